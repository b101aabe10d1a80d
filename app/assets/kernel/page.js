// The kernel view: one traced block of threads, access by access.

const STEP_MS = 260;
const STILL = window.matchMedia('(prefers-reduced-motion: reduce)');
const root = element.querySelector('.tw');
const $ = (selector) => root.querySelector(selector);
const CARDS = ['warps', 'cache', 'sectors', 'softmax', 'shared', 'reduction', 'hot'];
const card = (name) => `<section class="card k-${name}card" data-card="${name}"><h3></h3><div class="body"${['warps', 'shared', 'hot'].includes(name) ? ' tabindex="0" role="region"' : ''}></div></section>`;
const DRAWN = { warps: drawWarps, cache: drawCache, sectors: drawSectors, shared: drawShared, reduction: drawReduction, softmax: drawSoftmax };
let block = null, playing = null;

function build() {
  stop();
  if (!page?.events) { root.innerHTML = `<p class="empty">${say('nothing')}</p>`; return; }
  block = new Block(page);
  at = 0;
  root.innerHTML = `
    <header class="head"><div><h2></h2><p class="lesson"></p></div><button type="button" class="lang"></button></header>
    <section class="card rungcard"><h3></h3><div class="scroll" tabindex="0" role="region"></div></section>
    <div class="controls" role="group">
      <button type="button" data-do="first">${icon('M5 4h2v12H5zM16 4v12L8 10z')}</button>
      <button type="button" data-do="back">${icon('M10 4v12L3 10zM17 4v12l-7-6z')}</button>
      <button type="button" data-do="prev">${icon('M14 4v12L6 10z')}</button>
      <button type="button" data-do="play" class="playbtn"></button>
      <button type="button" data-do="next">${icon('M6 4v12l8-6z')}</button>
      <button type="button" data-do="phase">${icon('M10 4v12l7-6zM3 4v12l7-6z')}</button>
      <input type="range" class="scrub" min="0" value="0"><output class="where"></output>
    </div>
    <p class="say" aria-live="polite"></p><p class="place"></p>
    <div class="kcards">${card('warps')}
      <div class="kcols"><div>${card('cache')}</div><div>${card('sectors')}${card('softmax')}</div></div>
      ${card('shared')}${card('reduction')}${card('hot')}</div>
    <p class="foot"></p>`;
  $('.controls').addEventListener('click', (event) => act(event.target.closest('[data-do]')?.dataset.do));
  $('.scrub').addEventListener('input', (event) => { stop(); go(+event.target.value); });
  $('.lang').addEventListener('click', () => { lang = lang === 'en' ? 'zh' : 'en'; translate(); });
  $('.rungcard').addEventListener('click', (event) => {
    const rung = event.target.closest('button') && event.target.closest('[data-rung]')?.dataset.rung;
    if (rung && rung !== page.rung) trigger('rung', { rung });
  });
  $('.kcards').addEventListener('click', (event) => {
    const target = event.target.closest('[data-access]')?.dataset.access;
    if (target !== undefined) { stop(); go(+target); }
  });
  $('.kcards').addEventListener('pointerover', (event) => light(event.target.closest('[data-slot]')?.dataset.slot));
  $('.kcards').addEventListener('pointerleave', () => light(null));
  translate();
}

function light(slot) { // one physical slot, in the cache and in the lanes that read it
  for (const node of root.querySelectorAll('.lit')) node.classList.remove('lit');
  if (slot) for (const node of root.querySelectorAll(`[data-slot="${slot}"]`)) node.classList.add('lit');
}

function translate() {
  root.lang = lang === 'zh' ? 'zh-Hans' : 'en';
  showLang();
  $('.lang').textContent = say('lang');
  $('.lang').lang = lang === 'zh' ? 'en' : 'zh-Hans';
  $('h2').textContent = say('title');
  $('.lesson').textContent = say('lesson');
  $('.rungcard h3').innerHTML = `${say('rungs')} <small>${say('rungs_note')}</small>`;
  $('.rungcard .scroll').setAttribute('aria-label', say('rungs'));
  $('.rungcard .scroll').innerHTML = drawRungs(page);
  for (const name of CARDS) $(`[data-card="${name}"] h3`).innerHTML = say(name) + (name === 'hot' ? ` <small>${say('hot_note')}</small>` : '');
  for (const region of root.querySelectorAll('.body[role]')) region.setAttribute('aria-label', say(region.parentNode.dataset.card));
  for (const button of root.querySelectorAll('[data-do]:not(.playbtn)')) {
    button.setAttribute('aria-label', say(button.dataset.do));
    button.title = say(button.dataset.do);
  }
  $('.controls').setAttribute('aria-label', say('access'));
  $('.scrub').setAttribute('aria-label', say('access'));
  $('.scrub').max = block.events.length - 1;
  $('[data-card="hot"] .body').innerHTML = drawHot(block);
  const cut = page.num_events > block.events.length ? ` · ${fillIn(say('cut'), { shown: block.events.length, all: page.num_events })}` : '';
  $('.foot').textContent = say('keys') + cut;
  showPlaying();
  go(at);
}

function go(number) {
  const started = performance.now();
  at = Math.min(Math.max(0, number), block.events.length - 1);
  const event = block.events[at], site = block.view.sites[event.site], launch = page.launches.length > 1 ? `${say('launch')} ${event.launch + 1}, ` : '';
  $('.say').textContent = tellEvent(block, event);
  $('.place').textContent = `${launch}${say('phasen')} ${event.phase} · ${site.at} ${site.function}`;
  for (const [name, draw] of Object.entries(DRAWN)) $(`[data-card="${name}"] .body`).innerHTML = draw(block, event);
  $('.scrub').value = at;
  $('.scrub').setAttribute('aria-valuetext', `${say('access')} ${at + 1} ${say('of')} ${block.events.length}`);
  $('.where').textContent = `${at + 1} / ${block.events.length}`;
  root.dataset.step = at;
  performance.measure('twinfer-access', { start: started, end: performance.now() });
}

function phaseFrom(direction) {
  return direction > 0 ? block.phases.find((index) => index > at) ?? block.events.length - 1 : block.phases.findLast((index) => index < at) ?? 0;
}

function act(what) {
  if (!what) return;
  if (what === 'play') { toggle(); return; }
  stop();
  go({ first: 0, prev: at - 1, next: at + 1, phase: phaseFrom(1), back: phaseFrom(-1), last: block.events.length - 1 }[what]);
}

function showPlaying() {
  const button = $('.playbtn');
  button.textContent = say(playing ? 'pause' : 'play');
  button.setAttribute('aria-pressed', String(Boolean(playing)));
  $('.say').setAttribute('aria-live', playing ? 'off' : 'polite');
}

function stop() {
  clearInterval(playing);
  playing = null;
  if ($('.playbtn')) showPlaying();
}

function toggle() {
  if (playing) { stop(); return; }
  if (at >= block.events.length - 1) go(0);
  playing = setInterval(() => (element.isConnected && at < block.events.length - 1 ? go(at + 1) : stop()), STEP_MS);
  showPlaying();
}

document.addEventListener('keydown', (event) => {
  if (!block || !element.isConnected || !element.offsetParent || event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  if (target.closest?.('input, textarea, select, [role="listbox"], [role="tablist"]')) return;
  if (target.matches?.('[role="region"]') && target.scrollWidth > target.clientWidth) return; // the arrows move what is in it
  if (event.key === ' ' && target.closest?.('button, a, summary')) return;
  const what = { ArrowLeft: 'prev', ArrowRight: 'next', ArrowDown: 'phase', ArrowUp: 'back', Home: 'first', End: 'last', ' ': 'play' }[event.key];
  if (what) { event.preventDefault(); act(what); }
});

function show() {
  page = props.page;
  build();
}

watch('page', show);
show();
