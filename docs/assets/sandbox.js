// The page sandbox.md: a form, Python (Pyodide) behind it, and one step at a time. All that is decided, said and drawn
// comes from docs/support/sandbox.py; here are only the form, the way to Python and back, and the stepping.

(() => {
  const HERE = document.currentScript.src;
  const PYTHON = new URL('npm/pyodide/', HERE), ENGINE = new URL('sandbox/engine.zip', HERE);
  const root = document.getElementById('sandbox');
  const { presets, limits, choices, fields } = JSON.parse(document.getElementById('sandbox-form').textContent);
  const NUMBERS = ['blocks', 'block_size', 'budget', 'max_num_seqs', 'chunk'];
  const NAMES = {
    blocks: 'blocks', block_size: 'block size', budget: 'token budget', max_num_seqs: 'max_num_seqs',
    chunk: 'chunk limit', policy: 'policy', preemption: 'preemption', caching: 'prefix cache',
    name: 'name', prompt: 'prompt', shared: 'shared', tokens: 'answer', arrives: 'arrives', priority: 'priority', n: 'n',
  };
  const PLAY_MS = 900;

  let desk = null, starting = null, numSteps = 0, at = 0, timer = null;

  const $ = (selector) => root.querySelector(selector);
  const esc = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const icon = (path) => `<svg viewBox="0 0 20 20" aria-hidden="true"><path d="${path}"></path></svg>`;
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));

  // ---- the form

  const number = (name, value, label) => {
    const [least, most] = limits[name];
    return `<input type="number" data-field="${name}" aria-label="${esc(label)}" min="${least}" max="${most}" value="${value}" required>`;
  };
  const row = (request) => `<tr><td><input type="text" data-field="name" aria-label="name" maxlength="6" value="${esc(request.name)}" required></td>
    ${fields.map((name) => `<td>${number(name, request[name], `${NAMES[name]} of ${request.name}`)}</td>`).join('')}
    <td><button type="button" class="tw-drop" aria-label="remove ${esc(request.name)}" title="remove">×</button></td></tr>`;

  function build() {
    root.innerHTML = `
      <form novalidate>
        <label class="tw-preset">Preset <select data-preset>${Object.entries(presets).map(([key, preset]) => `<option value="${key}">${esc(preset.title)}</option>`).join('')}</select></label>
        <p class="tw-watch"></p>
        <div class="tw-options">
          ${NUMBERS.map((name) => `<label>${NAMES[name]} ${number(name, '', NAMES[name])}</label>`).join('')}
          ${Object.entries(choices).map(([name, values]) => `<label>${NAMES[name]} <select data-field="${name}">${values.map((v) => `<option>${v}</option>`).join('')}</select></label>`).join('')}
          <label class="tw-check"><input type="checkbox" data-field="caching"> ${NAMES.caching}</label>
        </div>
        <div class="tw-scroll" tabindex="0" role="group" aria-label="Requests"><table class="tw-requests"><thead><tr>${['name', ...fields].map((name) => `<th scope="col">${NAMES[name]}</th>`).join('')}<th><span class="tw-hidden">remove</span></th></tr></thead><tbody></tbody></table></div>
        <p class="tw-buttons"><button type="submit" class="md-button md-button--primary">Run</button>
          <button type="button" class="md-button tw-add">Add a request</button></p>
      </form>
      <p class="tw-status" role="status"></p><progress hidden aria-label="Starting Python"></progress>
      <section class="tw-run" hidden aria-label="The run">
        <dl class="tw-totals"></dl>
        <div class="tw-timeline tw-scroll" tabindex="0" role="group" aria-label="The schedule"></div>
        <div class="tw-steps" role="group" aria-label="Step">
          <button type="button" data-to="first" aria-label="First step" title="Home">${icon('M4 4h2v12H4zM16 4v12L7 10z')}</button>
          <button type="button" data-to="back" aria-label="One step back" title="←">${icon('M14 4v12L5 10z')}</button>
          <button type="button" data-to="play" class="tw-play"></button>
          <button type="button" data-to="on" aria-label="One step on" title="→">${icon('M6 4v12l9-6z')}</button>
          <button type="button" data-to="last" aria-label="Last step" title="End">${icon('M14 4h2v12h-2zM4 4v12l9-6z')}</button>
          <input type="range" min="0" value="0" aria-label="Step"><output></output>
        </div>
        <p class="tw-say" aria-live="polite"></p><ul class="tw-why"></ul>
        <dl class="tw-queues"></dl>
        <div class="tw-pool"></div>
        <div class="tw-scroll" tabindex="0" role="group" aria-label="Block tables"><table class="tw-tables"><thead><tr><th scope="col">table of</th><th scope="col">now</th><th scope="col">computed</th><th scope="col">blocks</th></tr></thead><tbody></tbody></table></div>
      </section>`;
    $('[data-preset]').addEventListener('change', (event) => { fill(event.target.value); if (desk) play(); });
    $('form').addEventListener('submit', (event) => { event.preventDefault(); play().then(() => $('.tw-play').focus()); });
    $('.tw-add').addEventListener('click', () => addRequest());
    $('form tbody').addEventListener('click', (event) => event.target.closest('.tw-drop')?.closest('tr').remove());
    $('.tw-steps').addEventListener('click', (event) => move(event.target.closest('[data-to]')?.dataset.to));
    $('.tw-steps input').addEventListener('input', (event) => { stop(); show(+event.target.value); });
    $('.tw-timeline').addEventListener('click', (event) => {
      const column = event.target.closest('[data-column]')?.dataset.column;
      if (column !== undefined) { stop(); show(+column); }
    });
    root.addEventListener('keydown', onKey);
    fill(Object.keys(presets)[0]);
  }

  function fill(key) {
    const { settings, watch } = presets[key];
    $('.tw-watch').textContent = watch;
    for (const name of [...NUMBERS, ...Object.keys(choices)]) $(`.tw-options [data-field="${name}"]`).value = settings[name];
    $('[data-field="caching"]').checked = settings.caching;
    $('form tbody').innerHTML = settings.requests.map(row).join('');
  }

  function addRequest() {
    const rows = [...root.querySelectorAll('form tbody tr')];
    const used = rows.map((tr) => tr.querySelector('[data-field="name"]').value);
    const name = [...'abcdefghijklmnopqrstuvwxyz'].find((letter) => !used.includes(letter)) ?? `r${rows.length}`;
    $('form tbody').insertAdjacentHTML('beforeend', row({ name, prompt: 8, shared: 0, tokens: 6, arrives: 0, priority: 0, n: 1 }));
    $('form tbody tr:last-child input').focus();
  }

  // An empty field is none: Python says what it wants there.
  const numberIn = (input) => (input.value === '' || Number.isNaN(+input.value) ? null : +input.value);

  function settings() {
    const found = { caching: $('[data-field="caching"]').checked };
    for (const name of NUMBERS) found[name] = numberIn($(`.tw-options [data-field="${name}"]`));
    for (const name of Object.keys(choices)) found[name] = $(`[data-field="${name}"]`).value;
    found.requests = [...root.querySelectorAll('form tbody tr')].map((tr) => ({
      name: tr.querySelector('[data-field="name"]').value,
      ...Object.fromEntries(fields.map((name) => [name, numberIn(tr.querySelector(`[data-field="${name}"]`))])),
    }));
    return found;
  }

  // ---- Python

  function status(text, isError = false) {
    $('.tw-status').textContent = text;
    $('.tw-status').classList.toggle('tw-error', isError);
  }

  async function startPython() {
    status('Fetching Python for the browser: 13 MB, once …');
    const { loadPyodide } = await import(new URL('pyodide.mjs', PYTHON).href);
    const [python, engine] = await Promise.all([
      loadPyodide({ indexURL: PYTHON.href }),
      fetch(ENGINE).then((answer) => {
        if (!answer.ok) throw new Error(`engine.zip: ${answer.status}`);
        return answer.arrayBuffer();
      }),
    ]);
    status('Importing the engine …');
    await wait(0); // let the line be painted
    python.unpackArchive(engine, 'zip', { extractDir: '/engine' });
    python.runPython("import sys; sys.path.insert(0, '/engine')");
    return python.pyimport('docs.support.sandbox').Desk();
  }

  async function play() {
    if (location.protocol === 'file:') {
      status('A page opened as a file may not load Python. Serve the site over http: make docs, or python -m http.server in its folder.', true);
      return;
    }
    stop();
    if (!desk) {
      $('progress').hidden = false;
      $('[type="submit"]').disabled = true;
      try {
        starting ??= startPython();
        desk = await starting;
      } catch (error) {
        starting = null;
        status(`Python could not be started: ${error.message}`, true);
        return;
      } finally {
        $('progress').hidden = true;
        $('[type="submit"]').disabled = false;
      }
    }
    const run = JSON.parse(desk.play(JSON.stringify(settings())));
    if (run.error) { status(run.error, true); return; }
    status(`Done: ${run.num_steps} steps, decided by reference/scheduler.py in this browser.`);
    open(run);
  }

  // ---- the run

  function open(run) {
    numSteps = run.num_steps;
    $('.tw-run').hidden = false;
    $('.tw-totals').innerHTML = Object.entries(run.totals).map(([name, value]) => `<div><dt>${name}</dt><dd>${value}</dd></div>`).join('');
    $('.tw-timeline').innerHTML = run.timeline;
    const svg = $('.tw-timeline svg');
    svg.style.cssText = `max-width: none; width: ${svg.viewBox.baseVal.width * 1.15}px`;
    $('.tw-steps input').max = numSteps - 1;
    show(0);
    showPlaying();
  }

  function show(step) {
    at = Math.min(Math.max(step, 0), numSteps - 1);
    const now = JSON.parse(desk.show(at));
    $('.tw-steps input').value = at;
    $('.tw-steps output').textContent = `${at} / ${numSteps - 1}`;
    $('.tw-say').textContent = now.say;
    $('.tw-why').innerHTML = now.why.map((reason) => `<li>${esc(reason)}</li>`).join('');
    const list = (names) => names.map(esc).join(' ') || '–';
    $('.tw-queues').innerHTML = Object.entries({ budget: [now.budget], ...now.queues, 'free blocks, next first': now.free })
      .map(([name, values]) => `<div><dt>${name}</dt><dd>${list(values)}</dd></div>`).join('');
    $('.tw-pool').innerHTML = now.pool;
    const blocks = (table, owner) => table.map((block) => `<span class="tw-chip" style="background: var(--tw-${owner})">${block}</span>`).join('');
    $('.tw-tables tbody').innerHTML = now.tables.map((table) => `<tr data-name="${esc(table.name)}"><th scope="row">${esc(table.name)}</th><td>${table.now || '–'}</td><td>${table.computed} of ${table.known}</td><td>${blocks(table.blocks, table.owner)}</td></tr>`).join('')
      + now.host.map((table) => `<tr><th scope="row">${esc(table.name)}, host pool</th><td>–</td><td>–</td><td>${blocks(table.blocks, 'swapped')}</td></tr>`).join('');
    for (const mark of root.querySelectorAll('.tw-timeline [data-column]')) mark.classList.toggle('tw-now', +mark.dataset.column === at);
    root.dataset.step = at;
    follow();
  }

  function follow() { // keeps the shown step in view, without moving the page
    const box = $('.tw-timeline'), mark = $('.tw-timeline text.tw-now');
    if (!mark) return;
    const place = mark.getBoundingClientRect(), frame = box.getBoundingClientRect();
    if (place.left < frame.left + 60 || place.right > frame.right - 30) box.scrollLeft += place.left - frame.left - frame.width / 2;
  }

  function move(where) {
    if (where === undefined) return;
    if (where === 'play') { toggle(); return; }
    stop();
    show({ first: 0, back: at - 1, on: at + 1, last: numSteps - 1 }[where]);
  }

  function showPlaying() {
    $('.tw-play').textContent = timer ? 'Pause' : 'Play';
    $('.tw-say').setAttribute('aria-live', timer ? 'off' : 'polite');
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    showPlaying();
  }

  function toggle() {
    if (timer) { stop(); return; }
    if (at === numSteps - 1) show(0);
    timer = setInterval(() => (at < numSteps - 1 ? show(at + 1) : stop()), PLAY_MS);
    showPlaying();
  }

  function onKey(event) {
    if ($('.tw-run').hidden || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest('form, input')) return;
    const step = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: numSteps - 1 }[event.key];
    if (step !== undefined) { event.preventDefault(); stop(); show(step); }
    if (event.key === ' ' && !event.target.closest('button')) { event.preventDefault(); toggle(); }
  }

  build();
})();
