// The page around the runs: figures, controls, keyboard, and what happens when Python hands over another page.

const SPEEDS = [0.5, 1, 2, 4, 8];
const BASE_MS = 900; // a step at speed 1
const FIGURES = ['num_steps', 'num_sampled_tokens', 'num_preemptions', 'num_cached_tokens'];
const STILL = window.matchMedia('(prefers-reduced-motion: reduce)');

const root = element.querySelector('.tw');
const $ = (selector) => root.querySelector(selector);
let whatIf = null;
const firstStep = () => page.runs[0]?.steps[0]?.n ?? 0; // not 0 where only the end of a long run is at hand

function build() {
  stop();
  lit = null;
  panes = page.runs.map((view, index) => new Pane(view, index));
  root.innerHTML = `
    <header class="head"><div><h2></h2><p class="lesson"></p></div><button type="button" class="lang"></button></header>
    <dl class="facts"></dl><div class="partings"></div>
    <div class="controls" role="group">
      <button type="button" data-do="first">${icon('M5 4h2v12H5zM16 4v12L8 10z')}</button>
      <button type="button" data-do="prev">${icon('M14 4v12L6 10z')}</button>
      <button type="button" data-do="play" class="playbtn"></button>
      <button type="button" data-do="next">${icon('M6 4v12l8-6z')}</button>
      <button type="button" data-do="last">${icon('M13 4h2v12h-2zM4 4v12l8-6z')}</button>
      <input type="range" class="scrub" min="0" value="0"><output class="where"></output>
      <label class="speed"><span></span><select>${SPEEDS.map((s) => `<option value="${s}"${s === speed ? ' selected' : ''}>${s}×</option>`).join('')}</select></label>
      <button type="button" class="whatifbtn" aria-expanded="false"></button>
    </div>
    <form class="whatif card" hidden></form>
    <div class="panes n${panes.length}"></div><p class="foot"></p>`;
  whatIf = new WhatIf($('.whatifbtn'), $('.whatif'));
  $('.panes').append(...panes.map((pane) => pane.node));
  $('.controls').addEventListener('click', (event) => {
    const what = event.target.closest('[data-do]')?.dataset.do;
    if (what === 'play') toggle();
    else if (what) { stop(); go({ first: 0, prev: at - 1, next: at + 1, last: longest() }[what]); }
  });
  $('.scrub').addEventListener('input', (event) => { stop(); go(+event.target.value); });
  $('.speed select').addEventListener('change', (event) => {
    speed = +event.target.value;
    if (timer) { stop(); toggle(); }
  });
  $('.lang').addEventListener('click', () => { lang = lang === 'en' ? 'zh' : 'en'; translate(); });
  $('.partings').addEventListener('click', (event) => {
    const step = event.target.closest('[data-goto]')?.dataset.goto;
    if (step !== undefined) { stop(); go(+step); }
  });
  translate();
}

function translate() {
  root.lang = lang === 'zh' ? 'zh-Hans' : 'en';
  showLang();
  $('.lang').textContent = say('lang');
  $('.lang').lang = lang === 'zh' ? 'en' : 'zh-Hans';
  for (const button of root.querySelectorAll('[data-do]:not(.playbtn)')) {
    button.setAttribute('aria-label', say(button.dataset.do));
    button.title = say(button.dataset.do);
  }
  $('.controls').setAttribute('aria-label', say('step'));
  $('.scrub').setAttribute('aria-label', say('step'));
  $('.speed span').textContent = say('speed');
  $('.foot').textContent = say('keys');
  showPlaying();
  drawRuns();
}

function drawRuns() { // all that depends on the runs
  root.dataset.done = page.runs.every((run) => run.is_done);
  $('.head h2').textContent = inLang(page.title) || page.runs[0]?.title || '';
  $('.head h2').classList.toggle('live', Boolean(page.is_live));
  $('.lesson').textContent = inLang(page.lesson);
  drawFacts();
  drawPartings();
  for (const pane of panes) pane.names();
  whatIf.names();
  go(at);
}

function drawFacts() {
  $('.facts').innerHTML = (page.facts ?? FIGURES).map((key, index) => {
    const values = page.runs.map((run) => run.facts[key]);
    const text = values.map((value, i) => `<span class="v${i}">${value ?? '–'}</span>`).join('<span class="to" aria-hidden="true">→</span>');
    return `<div class="fact${index ? '' : ' main'}" data-fact="${esc(key)}"><dt>${say('facts')[key] ?? esc(key)}</dt><dd>${text}</dd></div>`;
  }).join('');
}

function drawPartings() { // where two runs part, and why
  $('.partings').innerHTML = (page.comparisons ?? []).map((comparison) => {
    const isBad = comparison.meant_equal && comparison.step !== undefined;
    const jump = comparison.step === undefined ? ''
      : ` <button type="button" data-goto="${comparison.step}">${say('goto')} ${comparison.step}</button>`;
    return `<p class="parting${isBad ? ' bad' : ''}"><span>${esc(inLang(comparison.say))}</span>${jump}</p>`;
  }).join('');
}

function go(number) {
  const started = performance.now();
  at = Math.min(Math.max(0, number), longest());
  for (const pane of panes) pane.draw(at);
  const scrub = $('.scrub'), begin = firstStep();
  scrub.max = longest();
  scrub.value = at;
  scrub.setAttribute('aria-valuetext', `${say('step')} ${at + begin} ${say('of')} ${longest() + begin}`);
  $('.where').textContent = `${at + begin} / ${longest() + begin}`;
  root.dataset.step = at;
  whatIf.drawNote();
  performance.measure('twinfer-step', { start: started, end: performance.now() });
}

function showPlaying() {
  const button = $('.playbtn');
  button.textContent = say(timer ? 'pause' : 'play');
  button.setAttribute('aria-pressed', String(Boolean(timer)));
  for (const pane of panes) pane.$('.say').setAttribute('aria-live', timer ? 'off' : 'polite');
}

function stop() {
  clearInterval(timer);
  timer = null;
  if ($('.playbtn')) showPlaying();
}

function toggle() {
  if (timer) { stop(); return; }
  if (at >= longest() && page.runs.every((run) => run.is_done)) go(0);
  timer = setInterval(() => {
    if (!element.isConnected) { clearInterval(timer); return; }
    if (at >= longest()) { if (page.runs.every((run) => run.is_done)) stop(); return; }
    go(at + 1);
  }, BASE_MS / speed);
  showPlaying();
}

document.addEventListener('keydown', (event) => {
  if (!element.isConnected || !element.offsetParent || event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  if (target.closest?.('input, textarea, select, [contenteditable="true"], [role="listbox"], [role="grid"], [role="tablist"], table')) return;
  if (event.key === ' ' && target.closest?.('button, a, summary')) return;
  const move = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: longest() }[event.key];
  if (move !== undefined) { event.preventDefault(); stop(); go(move); }
  if (event.key === ' ') { event.preventDefault(); toggle(); }
});

new ResizeObserver(() => {
  for (const pane of panes) pane.fit();
}).observe(root);

function show() {
  const next = props.page ?? { runs: [] };
  const isKnown = page !== null && page.key !== undefined && page.key === next.key;
  const isGrown = isKnown && page.runs.length === next.runs.length;
  if (isGrown && page.runs.every((run) => run.is_done)) return; // told twice
  const following = isGrown && at >= longest(), before = isGrown ? firstStep() : 0, playing = isKnown && timer;
  page = next;
  if (isGrown) { // whoever reads, or has the focus somewhere, is not disturbed
    panes.forEach((pane, index) => pane.take(page.runs[index]));
    at = following ? longest() : Math.max(0, at - (firstStep() - before));
    drawRuns();
    return;
  }
  at = isKnown ? at : page.start ?? 0;
  build();
  if (playing || (!isKnown && page.autoplay && !STILL.matches && panes.length)) toggle();
}

watch('page', show);
show();
