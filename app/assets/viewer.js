// The step viewer. `props.page` is what app/state.py made: one run, or two to compare. Everything below happens in the
// browser: the steps, which arrive as differences, are unfolded once, and a step is then drawn without asking anybody.

const LABELS = {
  en: {
    first: 'First step', prev: 'Previous step', play: 'Play', pause: 'Pause', next: 'Next step', last: 'Last step',
    step: 'Step', of: 'of', speed: 'Speed', lang: '中文', pool: 'Block pool', tables: 'Block tables',
    budget: 'Token budget', queues: 'Queues', timeline: 'Timeline', running: 'running', waiting: 'waiting',
    swapped: 'swapped', finished: 'finished', held: 'kept out', prefill: 'prefill', decode: 'decode',
    accepted: 'drafts kept', rejected: 'drafts rejected', unused: 'unused', queued: 'queued', preempted: 'preempted',
    idle: 'idle', free: 'free', block: 'block', slots: 'slots filled', holders: 'held by', nobody: 'nobody',
    queue: 'free queue', next_out: 'next to be handed out', hash: 'hash', nohash: 'no hash', cached: 'in the prefix cache; if free, evictable',
    used: 'blocks held', filled: 'slots filled', hitrate: 'tokens from the cache', tokens: 'tokens sampled',
    delays: 'first / last token', steps: 'steps', ended: 'This run has ended.', none: 'none',
    blocks: 'blocks of', hint: 'Point at a block, or move through the pool with the arrow keys.', why: 'Why', rows: 'Requests',
    more: 'next requests', less: 'previous requests', nosteps: 'No step yet.', same: 'Both runs are equal, step for step.',
    differ: 'The runs differ first in step', differs: 'These runs part in step', keys: 'Keys: ← → step, space plays, Home and End',
    computed: 'computed', scheduled: 'in this step', known: 'waiting', empty: 'empty', hostpool: 'host pool',
    alloc: 'allocated', freed: 'freed', hit: 'cache hit', evict: 'evicted', copy: 'copied', out: 'swapped out',
    in: 'swapped in', request: 'request', gone: 'no steps', priority: 'priority', jump: 'click a step to jump to it',
    what: {
      block_tables: 'block table', num_scheduled_tokens: 'tokens computed', preempted: 'who is preempted',
      num_cached_tokens: 'tokens from the cache', block_copies: 'copies', swap_outs: 'blocks swapped out',
      swap_ins: 'blocks swapped in', draft_token_ids: 'drafts', sampled_token_ids: 'tokens sampled',
      refusal_reasons: 'why somebody waits', finished: 'who finishes', free_order: 'free queue', hashes: 'hashes',
      queues: 'queues', length: 'number of steps',
    },
    facts: {
      num_steps: 'steps', num_sampled_tokens: 'tokens written', num_prefill_tokens: 'prefill tokens computed',
      num_chunks: 'prefill chunks', largest_step: 'tokens in the largest step', num_cached_tokens: 'tokens from the cache',
      num_preemptions: 'preemptions', num_swapped_blocks: 'blocks swapped out', num_copies: 'copies on write',
      num_accepted: 'drafts kept', num_rejected: 'drafts rejected', peak_blocks: 'blocks at the peak',
      peak_running: 'running at the peak', mean_running: 'requests in a step, on average',
      mean_latency_steps: 'steps to the last token, on average', mean_fill: '% of held slots filled',
      wasted_slots: 'empty slots, on average', longest_table: 'longest block table',
      most_holders: 'holders of one block', first_preemption: 'step of the first preemption',
      first_copy: 'step of the first copy', urgent_ttft: 'steps until the urgent answer begins',
    },
  },
  zh: {
    first: '第一步', prev: '上一步', play: '播放', pause: '暂停', next: '下一步', last: '最后一步',
    step: '步', of: '/', speed: '速度', lang: 'English', pool: '物理块池', tables: '块表',
    budget: '词元预算', queues: '队列', timeline: '时间线', running: '运行', waiting: '等待', swapped: '已换出',
    finished: '完成', held: '未放入', prefill: '预填充', decode: '解码', accepted: '接受的草稿', rejected: '拒绝的草稿',
    unused: '未用', queued: '排队', preempted: '被抢占', idle: '空转', free: '空闲', block: '块', slots: '个槽已填',
    holders: '持有者', nobody: '无', queue: '空闲队列', next_out: '下一个分配', hash: '哈希', nohash: '无哈希',
    cached: '在前缀缓存中；空闲时可驱逐', used: '占用的块', filled: '已填的槽', hitrate: '缓存命中的词元', tokens: '采样的词元',
    delays: '首 / 末词元', steps: '步', ended: '本次运行已结束。', none: '无',
    blocks: '块，每块', hint: '指向一个块，或用方向键在块池中移动。', why: '原因', rows: '请求', more: '后面的请求', less: '前面的请求',
    nosteps: '还没有步。', same: '两次运行逐步相同。', differ: '两次运行首次不同于第', differs: '两次运行分开于第',
    keys: '按键：← → 换步，空格播放，Home 与 End', computed: '已计算', scheduled: '本步', known: '待计算', empty: '空',
    hostpool: '主机池', alloc: '分配', freed: '释放', hit: '命中', evict: '驱逐', copy: '复制', out: '换出', in: '换入',
    request: '请求', gone: '无', priority: '优先级', jump: '点击跳到该步',
    what: {
      block_tables: '块表', num_scheduled_tokens: '计算的词元', preempted: '被抢占者', num_cached_tokens: '缓存命中的词元',
      block_copies: '复制', swap_outs: '换出的块', swap_ins: '换入的块', draft_token_ids: '草稿', sampled_token_ids: '采样的词元',
      refusal_reasons: '等待的原因', finished: '完成者', free_order: '空闲队列', hashes: '哈希', queues: '队列', length: '步数',
    },
    facts: {
      num_steps: '步数', num_sampled_tokens: '写出的词元', num_prefill_tokens: '预填充计算的词元', num_chunks: '预填充块数',
      largest_step: '最大一步的词元', num_cached_tokens: '缓存命中的词元', num_preemptions: '抢占次数',
      num_swapped_blocks: '换出的块', num_copies: '写时复制', num_accepted: '接受的草稿', num_rejected: '拒绝的草稿',
      peak_blocks: '块的峰值', peak_running: '运行峰值', mean_running: '每步平均请求数',
      mean_latency_steps: '到末词元的平均步数', mean_fill: '% 槽位填充率', wasted_slots: '平均空槽', longest_table: '最长块表',
      most_holders: '单块持有者', first_preemption: '首次抢占的步', first_copy: '首次复制的步', urgent_ttft: '紧急请求首词元的步数',
    },
  },
};
const MARKS = { copy: '=', in: '↓', hit: '★', evict: '✕', alloc: '+', out: '↑', freed: '−' };
const PER_PAGE = 8; // requests whose tables are drawn at once
const MAX_CHIPS = 16; // blocks of one table
const MAX_CELLS = 2048; // blocks of the pool that are drawn
const SPEEDS = [0.5, 1, 2, 4, 8];
const BASE_MS = 900; // a step at speed 1

const root = element.querySelector('.tw');
const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&#39;' };
const esc = (text) => String(text).replace(/[&<>"']/g, (c) => ESCAPES[c]);
let lang = (navigator.language || 'en').startsWith('zh') ? 'zh' : 'en';
let page = null, panes = [], at = 0, timer = null, speed = 1, lit = null;
const say = (key) => LABELS[lang][key];
const inLang = (text) => (text && typeof text === 'object' ? text[lang] ?? text.en : text ?? '');
const hue = (request) => `o${request % 8} p${Math.floor(request / 8) % 5}`; // colour and pattern of an owner
const icon = (path) => `<svg viewBox="0 0 20 20" width="20" height="20" aria-hidden="true"><path d="${path}"></path></svg>`;
const visible = (piece) => esc(piece.replace(/\n/g, '↵').replace(/\t/g, '⇥')) || '·';

// ---- a run, unfolded ------------------------------------------------------------------------------------------------

function decodeOrder(before, pieces) {
  const after = [];
  for (const piece of pieces) {
    if (Array.isArray(piece)) for (let i = piece[0]; i < piece[1]; i++) after.push(before[i]);
    else after.push(piece);
  }
  return after;
}

function unfold(view) { // steps -> whole states, which share all that did not change
  let before = { run: [], wait: [], swap: [], held: [], tables: {}, host: {}, free: [], hash: {}, pos: {}, ended: [] };
  const outputs = view.requests.map(() => []); // per request: [step, piece] of each token
  const states = view.steps.map((step, number) => {
    const state = { ...before, step };
    for (const name of ['run', 'wait', 'swap', 'held']) if (step[name]) state[name] = step[name];
    if (step.tables || step.gone) {
      state.tables = { ...before.tables, ...step.tables };
      for (const r of step.gone ?? []) delete state.tables[r];
    }
    state.host = step.host || Object.keys(before.host).length
      ? Object.fromEntries(Object.entries({ ...before.host, ...step.host }).filter(([r]) => state.swap.includes(+r)))
      : before.host;
    if (step.free) state.free = decodeOrder(before.free, step.free);
    if (step.hash) {
      state.hash = { ...before.hash };
      for (const [block, text] of step.hash) if (text === null) delete state.hash[block]; else state.hash[block] = text;
    }
    state.pos = {};
    for (const [r, count, decode, start, known, drafts, kept] of step.sched)
      state.pos[r] = { count, decode, start, known, drafts, kept };
    for (const [r, start, known] of step.idle ?? []) state.pos[r] = { count: 0, decode: 0, start, known, drafts: 0, kept: 0 };
    for (const [r, pieces] of Object.entries(step.tok ?? {})) for (const p of pieces) outputs[r].push([number, p]);
    if (step.fin) state.ended = [...before.ended, ...step.fin];
    before = state;
    return state;
  });
  return { view, states, outputs };
}

function holdersOf(state) {
  const holders = new Map();
  for (const [r, table] of Object.entries(state.tables))
    table.forEach((block, index) => {
      if (!block) return;
      if (!holders.has(block)) holders.set(block, []);
      holders.get(block).push([+r, index]);
    });
  return holders;
}

function marksOf(step) {
  const marks = new Map();
  for (const b of step.freed ?? []) marks.set(b, 'freed');
  for (const [b] of step.out ?? []) marks.set(b, 'out');
  for (const b of step.alloc ?? []) marks.set(b, 'alloc');
  for (const b of step.evict ?? []) marks.set(b, 'evict');
  for (const b of step.hit ?? []) marks.set(b, 'hit');
  for (const [b] of step.in ?? []) marks.set(b, 'in');
  for (const [, , b] of step.copy ?? []) marks.set(b, 'copy');
  return marks;
}

// ---- one run on the page --------------------------------------------------------------------------------------------

class Pane {
  constructor(view, index) {
    Object.assign(this, unfold(view), { index, first: 0, cells: [], keys: [], cursor: 1 });
    this.node = document.createElement('article');
    this.node.className = 'pane';
    this.node.innerHTML = `
      <h3 class="name"></h3>
      <p class="say"></p><ul class="why"></ul>
      <section class="card budget"><h4></h4><div class="bar" role="img"></div><div class="key"></div></section>
      <div class="two">
        <section class="card poolcard"><h4></h4><div class="pool" tabindex="0" role="group"></div>
          <p class="info" role="status"></p><div class="key marks"></div></section>
        <section class="card tablecard"><h4></h4><div class="rows"></div><nav class="pager" hidden></nav></section>
      </div>
      <section class="card queuecard"><h4></h4><div class="queues"></div></section>
      <section class="card timecard"><h4></h4><div class="gantt"></div><div class="key"></div></section>`;
    this.$ = (selector) => this.node.querySelector(selector);
    this.listen();
  }

  get last() { return this.states.length - 1; }

  listen() {
    const pool = this.$('.pool');
    pool.addEventListener('keydown', (event) => {
      const row = Math.max(1, Math.round(pool.clientWidth / (this.cells[0]?.offsetWidth + 4 || 48)));
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      this.cursor = Math.min(Math.max(1, this.cursor + move), this.cells.length);
      light(this.cursor, this);
    });
    pool.addEventListener('focus', () => pool.matches(':focus-visible') && light(this.cursor, this));
    pool.addEventListener('blur', () => light(null, this));
    this.node.addEventListener('pointerover', (event) => {
      const block = event.target.closest('[data-block]');
      light(block ? +block.dataset.block : null, this);
    });
    this.node.addEventListener('pointerleave', () => light(null, this));
    this.$('.gantt').addEventListener('click', (event) => {
      const box = this.$('.gantt svg')?.getBoundingClientRect();
      if (!box) return;
      const x = event.clientX - box.left - this.left;
      if (x >= 0) go(Math.floor(x / this.unit));
    });
    this.$('.pager').addEventListener('click', (event) => {
      if (!event.target.dataset.by) return;
      this.first = Math.max(0, this.first + +event.target.dataset.by);
      this.drawTables(this.state);
    });
  }

  names() { // everything that depends on the language or the width, but not on the step
    const head = (selector, text) => { this.$(`${selector} h4`).innerHTML = text; };
    const side = page.sides?.[this.index];
    const title = inLang(side) || this.view.title;
    this.$('.name').innerHTML = `${esc(title)} <small>${esc(this.view.tier)} · ${esc(this.view.model)} · ` +
      `${this.view.num_blocks} ${say('blocks')} ${this.view.block_size}</small>`;
    head('.budget', say('budget'));
    head('.poolcard', say('pool'));
    head('.tablecard', say('tables'));
    head('.queuecard', say('queues'));
    head('.timecard', `${say('timeline')} <small>${say('jump')}</small>`);
    this.$('.pool').setAttribute('aria-label', `${say('pool')}. ${say('hint')}`);
    this.$('.info').textContent = say('hint');
    this.$('.marks').innerHTML = Object.entries(MARKS)
      .map(([name, mark]) => `<span><b class="cell ev-${name}">${mark}</b>${say(name)}</span>`).join('') +
      `<span><b class="cell">#</b>${say('cached')}</span><span><b class="cell">q1</b>${say('next_out')}</span>`;
    this.$('.timecard .key').innerHTML = ['prefill', 'decode', 'queued', ...(this.view.is_static ? ['held'] : []), 'preempted', 'swapped']
      .map((kind) => `<span><b class="swatch k-${kind}"></b>${say(kind)}</span>`).join('');
    this.makePool();
    this.drawTimeline();
  }

  fit() { // to the width there is now
    this.node.classList.toggle('wide', this.node.clientWidth >= 900);
    if (this.$('.gantt').clientWidth !== this.drawnWidth) this.drawTimeline();
  }

  makePool() {
    const pool = this.$('.pool'), count = Math.min(this.view.num_blocks, MAX_CELLS);
    this.dense = count > 160;
    pool.classList.toggle('dense', this.dense);
    pool.replaceChildren();
    this.cells = [];
    this.keys = [];
    for (let block = 1; block <= count; block++) {
      const cell = document.createElement('div');
      cell.dataset.block = block;
      pool.append(cell);
      this.cells.push(cell);
    }
  }

  draw(number) {
    this.state = this.states[Math.min(number, this.last)];
    this.node.classList.toggle('over', number > this.last);
    if (!this.state) { this.$('.say').textContent = say('nosteps'); return; }
    this.holders = holdersOf(this.state);
    const step = this.state.step, over = number > this.last;
    this.$('.say').textContent = over ? say('ended') : step.say[lang] ?? step.say.en;
    const reasons = over ? [] : [...(step.pre ?? []), ...(step.ref ?? [])].filter(([, text]) => text);
    this.$('.why').innerHTML = reasons.map(([r, text]) => `<li>${this.letter(r)} ${esc(text)}</li>`).join('');
    this.drawBudget(step);
    this.drawPool(this.state);
    this.drawTables(this.state);
    this.drawQueues(this.state);
    this.moveCursor(number);
    if (lit !== null) light(lit, this, true);
  }

  letter(r) { return `<span class="badge ${hue(r)}">${this.view.requests[r].label}</span>`; }

  badge(r) { return `${this.letter(r)}<span class="id">${esc(this.view.requests[r].id)}</span>`; }

  drawBudget(step) {
    const parts = { prefill: 0, decode: 0, accepted: 0, rejected: 0 };
    for (const [, count, decode, , , drafts, kept] of step.sched) {
      parts[decode ? 'decode' : 'prefill'] += count - drafts;
      parts.accepted += kept;
      parts.rejected += drafts - kept;
    }
    const used = Object.values(parts).reduce((a, b) => a + b, 0);
    parts.unused = Math.max(0, step.budget - used);
    const total = used + parts.unused || 1, shown = Object.entries(parts).filter(([, count]) => count);
    const bar = this.$('.budget .bar');
    bar.innerHTML = shown.map(([name, count]) =>
      `<span class="k-${name}" style="width:${(100 * count) / total}%">${count / total > 0.04 ? count : ''}</span>`).join('');
    const words = shown.map(([name, count]) => `${count} ${say(name)}`).join(', ');
    bar.setAttribute('aria-label', `${say('budget')}: ${used} ${say('of')} ${step.budget}: ${words}`);
    this.$('.budget .key').innerHTML = `<b>${used} ${say('of')} ${step.budget}</b>` +
      shown.map(([name, count]) => `<span><b class="swatch k-${name}"></b>${count} ${say(name)}</span>`).join('');
  }

  fill(block) {
    const size = this.view.block_size;
    let fill = 0;
    for (const [r, index] of this.holders.get(block) ?? []) {
      const pos = this.state.pos[r];
      if (pos) fill = Math.max(fill, Math.min(Math.max(pos.start + pos.count - index * size, 0), size));
    }
    return fill;
  }

  drawPool(state) {
    const marks = marksOf(state.step), place = new Map(state.free.map((block, i) => [block, i + 1]));
    this.place = place;
    for (let i = 0; i < this.cells.length; i++) {
      const block = i + 1, held = this.holders.get(block), mark = marks.get(block), hash = state.hash[block];
      const fill = held ? this.fill(block) : 0;
      const dense = this.dense;
      const key = `${held ? held.map(([r]) => r) : ''}|${mark}|${hash ? 1 : 0}|${fill}|${dense ? '' : place.get(block)}`;
      if (this.keys[i] === key) continue;
      this.keys[i] = key;
      const cell = this.cells[i];
      const owner = held ? (held.length > 1 ? 'shared' : hue(held[0][0])) : 'free';
      cell.className = `cell ${owner}${hash ? ' hashed' : ''}${mark ? ` ev-${mark}` : ''}`;
      const names = held ? held.map(([r]) => this.view.requests[r].label) : [];
      const letters = names.length > 3 ? `${names[0]}+${names.length - 1}` : names.join('');
      cell.style.background = held?.length > 1 ? this.stripes(held) : '';
      const small = dense ? '' : `<span class="no">${block}</span>`;
      cell.innerHTML = `${small}<span class="own">${letters}</span>` + (dense ? '' : `<span class="sub">${held ? (names.length > 1 ? `×${names.length}` : '') : `q${place.get(block) ?? ''}`}</span>`) +
        (hash && !dense ? '<span class="hash">#</span>' : '') + (mark ? `<span class="mark">${MARKS[mark]}</span>` : '') +
        (held ? `<i class="fill"><i style="width:${(100 * fill) / this.view.block_size}%"></i></i>` : '');
    }
  }

  stripes(held) { // a shared block shows the colours of its first four holders
    const some = held.slice(0, 4), share = 100 / some.length;
    const stops = some.map(([r], i) => `var(--o${r % 8}) ${i * share}% ${(i + 1) * share}%`);
    return `linear-gradient(90deg, ${stops.join(', ')})`;
  }

  order(state) {
    const ended = state.ended.map(([r]) => r);
    return [...new Set([...state.run, ...Object.keys(state.pos).map(Number), ...state.swap, ...state.wait, ...state.held, ...ended])];
  }

  status(r, state) {
    const end = state.ended.find(([other]) => other === r);
    if (end) return `${say('finished')}: ${end[1]}`;
    if (state.swap.includes(r)) return say('swapped');
    if (state.held.includes(r)) return say('held');
    if (state.wait.includes(r)) return say((state.step.pre ?? []).some(([p]) => p === r) ? 'preempted' : 'waiting');
    const pos = state.pos[r];
    return pos?.count ? `${say(pos.decode ? 'decode' : 'prefill')} +${pos.count}` : say('running');
  }

  piece(r, position, step) { // text of a token; behind the known ones stand this step's drafts
    const prompt = this.view.requests[r].prompt, outputs = this.outputs[r];
    if (position < prompt.length) return this.view.pieces[prompt[position]];
    const known = this.state.pos[r]?.known ?? prompt.length;
    if (position >= known) return this.view.pieces[step.draft?.[r]?.[position - known]] ?? '?';
    return this.view.pieces[outputs[position - prompt.length]?.[1]] ?? '·';
  }

  drawTables(state) {
    const all = this.order(state), pages = Math.ceil(all.length / PER_PAGE);
    this.first = Math.min(this.first, Math.max(0, (pages - 1) * PER_PAGE));
    const shown = all.slice(this.first, this.first + PER_PAGE);
    this.$('.rows').innerHTML = shown.map((r) => this.row(r, state)).join('') || `<p class="empty">${say('none')}</p>`;
    const pager = this.$('.pager');
    pager.hidden = pages < 2;
    if (pages > 1)
      pager.innerHTML = `<button type="button" data-by="-${PER_PAGE}" ${this.first ? '' : 'disabled'}>${say('less')}</button>` +
        `<span>${this.first + 1}–${this.first + shown.length} ${say('of')} ${all.length}</span>` +
        `<button type="button" data-by="${PER_PAGE}" ${this.first + PER_PAGE < all.length ? '' : 'disabled'}>${say('more')}</button>`;
  }

  row(r, state) {
    const request = this.view.requests[r], pos = state.pos[r], table = state.tables[r] ?? [];
    const number = Math.min(at, this.last);
    const tokens = this.outputs[r].filter(([n]) => n <= number);
    const fresh = tokens.filter(([n]) => n === number).length;
    const text = tokens.slice(-24).map(([n, p]) => {
      const piece = this.view.pieces[p];
      return n === number ? `${piece.startsWith(' ') ? ' ' : ''}<mark>${visible(piece.trimStart())}</mark>` : visible(piece);
    }).join('');
    const host = (state.host[r] ?? []).map((b) => `<span class="chip host">⇪${b}</span>`).join('');
    const first = table.length > MAX_CHIPS ? table.length - MAX_CHIPS + 2 : 0; // of a long table the head and the tail
    const chips = table.map((block, index) => {
      if (first && index >= 2 && index < first) return index === 2 ? `<span class="chip null">… ${first - 2} …</span>` : '';
      return this.chip(r, block, index, pos, state);
    }).join('');
    return `<div class="row${state.ended.some(([x]) => x === r) ? ' done' : ''}" data-request="${esc(request.id)}">
      <div class="rowhead">${this.badge(r)}<span class="status">${esc(this.status(r, state))}</span>${this.interval(pos)}</div>
      ${chips || host ? `<div class="chips">${chips}${host}</div>` : ''}
      ${text ? `<p class="text">${tokens.length > 24 ? '…' : ''}${text}</p>` : ''}${this.candidates(r, tokens.length, fresh)}</div>`;
  }

  interval(pos) {
    if (!pos) return '';
    const end = pos.start + pos.count, total = Math.max(pos.known, end) || 1;
    const part = (kind, count) => (count > 0 ? `<i class="${kind}" style="flex:${count}"></i>` : '');
    return `<span class="interval" title="${say('computed')} ${pos.start}, ${say('scheduled')} ${pos.count}, ${say('known')} ${total - end}">` +
      `${part('done', pos.start)}${part('now', pos.count)}${part('todo', total - end)}</span>` +
      `<span class="count">${pos.start}<b>+${pos.count}</b>/${total}</span>`;
  }

  chip(r, block, index, pos, state) {
    if (!block) return `<span class="chip null">0</span>`;
    const size = this.view.block_size, from = index * size, end = pos ? pos.start + pos.count : 0;
    const shown = Math.min(size, 8);
    let old = '', fresh = ''; // words computed before, and in this step
    for (let p = from; p < Math.min(from + shown, end); p++) {
      if (p < pos.start) old += visible(this.piece(r, p, state.step));
      else fresh += visible(this.piece(r, p, state.step));
    }
    const text = old + (fresh && `<span class="now">${fresh}</span>`);
    const holders = this.holders.get(block).length;
    return `<span class="chip ${hue(r)}${holders > 1 ? ' multi' : ''}" data-block="${block}"><span class="at">${index}→<b>${block}</b>` +
      `${holders > 1 ? ` ×${holders}` : ''}</span><span class="words">${text}${Math.min(end - from, size) > shown ? '…' : ''}</span></span>`;
  }

  candidates(r, count, fresh) {
    if (!fresh) return '';
    const entries = this.view.requests[r].candidates[count - 1];
    if (!entries) return '';
    return `<ol class="cands">${entries.slice(0, 5).map(([text, p]) =>
      `<li><i style="width:${100 * p}%"></i><span>${visible(text)}</span><b>${(100 * p).toFixed(1)} %</b></li>`).join('')}</ol>`;
  }

  drawQueues(state) {
    const ended = state.ended.map(([r]) => r);
    const queues = { running: state.run.filter((r) => !ended.includes(r)), waiting: state.wait, swapped: state.swap, held: state.held, finished: ended };
    if (!this.view.is_static) delete queues.held;
    this.$('.queues').innerHTML = Object.entries(queues).map(([name, list]) =>
      `<div class="queue" data-queue="${name}"><h5>${say(name)} <b>${list.length}</b></h5><div>${list.slice(0, 24)
        .map((r) => `<span class="who" title="${esc(this.view.requests[r].id)}">${this.badge(r)}</span>`).join('')}${
        list.length > 24 ? `+${list.length - 24}` : ''}</div></div>`).join('');
  }

  // ---- timeline: drawn once a run, only its cursor moves ----

  drawTimeline() {
    this.drawnWidth = this.$('.gantt').clientWidth;
    const box = this.$('.gantt'), width = Math.max(box.clientWidth, 260), rowHeight = 20, charts = 3 * 58;
    const count = longest() + 1, rows = this.view.requests;
    this.left = width > 480 ? 96 : 34;
    const right = width > 640 ? 132 : 4;
    this.unit = (width - this.left - right) / count;
    const top = 18, height = top + rows.length * rowHeight + charts + 10;
    this.height = height;
    const parts = [this.patterns(), this.axis(count, top, height)];
    if (right > 4) parts.push(`<text class="small" x="${width - right + 8}" y="12">${say('delays')}</text>`);
    rows.forEach((request, index) => parts.push(this.ganttRow(request, index, top + index * rowHeight, width, right)));
    parts.push(this.charts(top + rows.length * rowHeight + 12, width, right));
    parts.push(`<rect class="cursor" y="${top - 2}" width="${Math.max(this.unit, 2)}" height="${height - top}"></rect>`);
    const summary = `${say('timeline')}: ${rows.length} ${say('rows')}, ${this.states.length} ${say('steps')}`;
    box.innerHTML = `<svg width="${width}" height="${height}" role="img" aria-label="${esc(summary)}">${parts.join('')}</svg>`;
    this.cursorNode = box.querySelector('.cursor');
    this.moveCursor(at);
  }

  patterns() {
    const id = `h${this.index}`;
    return `<defs>${['queued', 'preempted', 'swapped', 'held'].map((kind, i) =>
      `<pattern id="${id}${kind}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(${45 + i * 45})">` +
      `<rect width="6" height="6" class="pb-${kind}"></rect><line x1="0" y1="0" x2="0" y2="6" class="pl-${kind}"></line></pattern>`).join('')}</defs>`;
  }

  axis(count, top, height) {
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n * this.unit > 28) ?? 2000;
    let text = '';
    for (let n = 0; n < count; n += every)
      text += `<line class="grid" x1="${this.left + n * this.unit}" x2="${this.left + n * this.unit}" y1="${top - 4}" y2="${height}"></line>` +
        `<text class="small" x="${this.left + n * this.unit + 2}" y="11">${n}</text>`;
    return text;
  }

  ganttRow(request, index, y, width, right) {
    const shape = request.segments.map(([kind, start, length, tokens]) => {
      const x = this.left + start * this.unit, w = Math.max(length * this.unit - (this.unit > 4 ? 1 : 0), 0.7);
      const hatched = ['queued', 'preempted', 'swapped', 'held'].includes(kind);
      const paint = hatched ? `fill="url(#h${this.index}${kind})"` : `class="s-${kind}"`;
      const tall = kind === 'decode' || kind === 'idle' ? 8 : 14;
      const note = kind === 'prefill' && w > 7 * String(tokens).length + 3
        ? `<text class="inbar" x="${x + w / 2}" y="${y + 14}">${tokens}</text>` : '';
      return `<rect ${paint} x="${x}" y="${y + 10 - tall / 2}" width="${w}" height="${tall}" rx="2"><title>${esc(request.id)}: ` +
        `${say(kind)}, ${say('step')} ${start}${length > 1 ? `–${start + length - 1}` : ''}${tokens ? `, ${tokens}` : ''}</title></rect>${note}`;
    }).join('');
    const end = request.end === undefined ? ''
      : `<circle class="end" cx="${Math.min(this.left + (request.end + 1) * this.unit, width - right)}" cy="${y + 10}" r="3.5"></circle>`;
    const ms = (s) => (s === undefined ? '' : s < 0.1 ? `${(1000 * s).toFixed(1)} ms` : `${s.toFixed(2)} s`);
    const delays = right > 4 ? `<text class="small" x="${width - right + 8}" y="${y + 14}">${request.ttft_steps ?? '–'} / ` +
      `${request.latency_steps ?? '–'} · ${ms(request.latency_s)}</text>` : '';
    const name = this.left > 60 ? `<text class="small" x="26" y="${y + 14}">${esc(request.id.slice(0, 10))}</text>` : '';
    return `<rect class="ow" style="fill:var(--o${index % 8})" x="2" y="${y + 2}" width="20" height="16" rx="4"></rect>` +
      `<text class="letter" x="12" y="${y + 14}">${request.label}</text>${name}${shape}${end}${delays}`;
  }

  charts(y, width, right) {
    let cached = 0, asked = 0;
    const hits = [], used = [], filled = [], tokens = [];
    for (const { step } of this.states) {
      for (const n of Object.values(step.cached ?? {})) { cached += n; asked += n; }
      for (const [, count, decode] of step.sched) if (!decode) asked += count;
      hits.push(asked ? cached / asked : 0);
      used.push(step.slots / this.view.block_size / (this.view.num_blocks || 1));
      filled.push(step.filled / ((this.view.num_blocks || 1) * this.view.block_size));
      tokens.push(Object.values(step.tok ?? {}).reduce((sum, list) => sum + list.length, 0));
    }
    const most = Math.max(1, ...tokens), percent = (value) => `${Math.round(100 * value)} %`;
    return this.chart(y, `${say('used')} / ${say('filled')}`, percent(Math.max(0, ...used)), [['area', used], ['line', filled]]) +
      this.chart(y + 58, say('hitrate'), percent(hits.at(-1) ?? 0), [['area', hits]]) +
      this.chart(y + 116, say('tokens'), String(most), [['bars', tokens.map((n) => n / most)]]);
  }

  chart(y, title, most, series) {
    const height = 34, base = y + 15 + height, x = (i) => this.left + i * this.unit;
    const shapes = series.map(([kind, values]) => {
      const line = values.map((v, i) => `L${x(i).toFixed(1)},${(base - v * height).toFixed(1)}h${this.unit.toFixed(2)}`).join('');
      if (kind === 'line') return `<path class="c-line" d="M${x(0)},${base}${line}"></path>`;
      return `<path class="c-${kind}" d="M${x(0)},${base}${line}V${base}Z"></path>`;
    }).join('');
    return `<text class="small" x="${this.left}" y="${y + 9}">${esc(title)} <tspan class="strong">${esc(most)}</tspan></text>` +
      `<line class="axis" x1="${this.left}" x2="${x(Math.max(this.states.length, 1))}" y1="${base}" y2="${base}"></line>${shapes}`;
  }

  moveCursor(number) {
    this.cursorNode?.setAttribute('x', this.left + Math.min(number, Math.max(this.last, 0)) * this.unit);
  }

  describe(block) {
    const held = this.holders?.get(block), hash = this.state?.hash[block];
    const words = [`${say('block')} ${block}`];
    if (held) {
      words.push(`${say('holders')} ${held.map(([r]) => this.view.requests[r].id).join(', ')} (×${held.length})`);
      words.push(`${this.fill(block)}/${this.view.block_size} ${say('slots')}`);
    } else {
      const place = this.place?.get(block);
      words.push(say('free'), place === 1 ? say('next_out') : `${say('queue')} ${place}`);
    }
    words.push(hash ? `${say('hash')} ${hash}${held ? '' : ` (${say('cached')})`}` : say('nohash'));
    return words.join(' · ');
  }
}

function light(block, pane, again = false) { // one block, wherever it is drawn in its pane
  if (block === lit && !again) return;
  lit = block;
  for (const other of panes)
    for (const node of other.node.querySelectorAll('.lit')) node.classList.remove('lit');
  if (block === null) return;
  pane.cursor = block;
  for (const node of pane.node.querySelectorAll(`[data-block="${block}"]`)) node.classList.add('lit');
  pane.$('.info').textContent = pane.describe(block);
}

// ---- the page -------------------------------------------------------------------------------------------------------

const longest = () => Math.max(0, ...panes.map((pane) => pane.last));

function build() {
  stop();
  page = props.page ?? { runs: [] };
  panes = page.runs.map((view, index) => new Pane(view, index));
  root.innerHTML = `
    <header class="head"><div><h2></h2><p class="lesson"></p></div><button type="button" class="lang"></button></header>
    <dl class="facts"></dl><p class="parting" hidden></p>
    <div class="controls" role="group">
      <button type="button" data-do="first">${icon('M5 4h2v12H5zM16 4v12L8 10z')}</button>
      <button type="button" data-do="prev">${icon('M14 4v12L6 10z')}</button>
      <button type="button" data-do="play" class="playbtn"></button>
      <button type="button" data-do="next">${icon('M6 4v12l8-6z')}</button>
      <button type="button" data-do="last">${icon('M13 4h2v12h-2zM4 4v12l8-6z')}</button>
      <input type="range" class="scrub" min="0" value="0"><output class="where"></output>
      <label class="speed"><span></span><select>${SPEEDS.map((s) => `<option value="${s}"${s === speed ? ' selected' : ''}>${s}×</option>`).join('')}</select></label>
    </div>
    <div class="panes n${panes.length}"></div><p class="foot"></p>`;
  root.querySelector('.panes').append(...panes.map((pane) => pane.node));
  root.querySelector('.controls').addEventListener('click', (event) => {
    const what = event.target.closest('[data-do]')?.dataset.do;
    if (what === 'play') toggle();
    else if (what) { stop(); go({ first: 0, prev: at - 1, next: at + 1, last: longest() }[what]); }
  });
  root.querySelector('.scrub').addEventListener('input', (event) => { stop(); go(+event.target.value); });
  root.querySelector('.speed select').addEventListener('change', (event) => {
    speed = +event.target.value;
    if (timer) { stop(); toggle(); }
  });
  root.querySelector('.lang').addEventListener('click', () => { lang = lang === 'en' ? 'zh' : 'en'; translate(); });
  translate();
}

function translate() {
  root.lang = lang === 'zh' ? 'zh-Hans' : 'en';
  const $ = (selector) => root.querySelector(selector);
  $('.head h2').textContent = inLang(page.title) || page.runs[0]?.title || '';
  $('.lesson').textContent = inLang(page.lesson);
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
  drawFacts();
  panes.forEach((pane) => pane.names());
  go(at);
}

function drawFacts() {
  const shown = page.facts ?? ['num_steps', 'num_sampled_tokens', 'num_preemptions', 'num_cached_tokens'];
  root.querySelector('.facts').innerHTML = shown.map((key, index) => {
    const values = page.runs.map((run) => run.facts[key]);
    const text = values.map((value, i) => `<span class="v${i}">${value ?? '–'}</span>`).join('<span class="to" aria-hidden="true">→</span>');
    return `<div class="fact${index ? '' : ' main'}" data-fact="${esc(key)}"><dt>${say('facts')[key] ?? esc(key)}</dt><dd>${text}</dd></div>`;
  }).join('');
  const parting = root.querySelector('.parting'), comparison = page.comparison;
  parting.hidden = !comparison;
  if (!comparison) return;
  const d = comparison.difference;
  parting.classList.toggle('bad', Boolean(d && comparison.meant_equal));
  parting.textContent = d
    ? `${say(comparison.meant_equal ? 'differ' : 'differs')} ${d.step}, ${say('what')[d.what] ?? d.what}${d.request ? ` (${d.request})` : ''}: ${d.values.join(' ≠ ')}`
    : say('same');
}

function go(number) {
  const started = performance.now();
  at = Math.min(Math.max(0, number), longest());
  for (const pane of panes) pane.draw(at);
  const scrub = root.querySelector('.scrub');
  scrub.max = longest();
  scrub.value = at;
  scrub.setAttribute('aria-valuetext', `${say('step')} ${at} ${say('of')} ${longest()}`);
  root.querySelector('.where').textContent = `${at} / ${longest()}`;
  root.dataset.step = at;
  performance.measure('twinfer-step', { start: started, end: performance.now() });
}

function showPlaying() {
  const button = root.querySelector('.playbtn');
  button.textContent = say(timer ? 'pause' : 'play');
  button.setAttribute('aria-pressed', String(Boolean(timer)));
  for (const pane of panes) pane.$('.say').setAttribute('aria-live', timer ? 'off' : 'polite');
}

function stop() {
  clearInterval(timer);
  timer = null;
  if (root.querySelector('.playbtn')) showPlaying();
}

function toggle() {
  if (timer) { stop(); return; }
  if (at >= longest()) go(0);
  timer = setInterval(() => {
    if (!element.isConnected) { clearInterval(timer); return; }
    if (at >= longest()) { if (page.runs.every((run) => run.is_done)) stop(); return; }
    go(at + 1);
  }, BASE_MS / speed);
  showPlaying();
}

document.addEventListener('keydown', (event) => {
  if (!element.isConnected || event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  if (target.closest?.('input, textarea, select, [contenteditable="true"], [role="listbox"], [role="grid"], table')) return;
  if (event.key === ' ' && target.closest?.('button, a, summary')) return;
  const move = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: longest() }[event.key];
  if (move !== undefined) { event.preventDefault(); stop(); go(move); }
  if (event.key === ' ') { event.preventDefault(); toggle(); }
});

new ResizeObserver(() => {
  for (const pane of panes) pane.fit();
}).observe(root);

function show() {
  const isKnown = page !== null && page.key !== undefined && page.key === props.page?.key;
  if (isKnown && page.runs.every((run) => run.is_done) && page.runs.length === props.page.runs.length) return; // told twice
  const growing = isKnown;
  const following = growing && at >= longest();
  if (!growing) at = 0;
  build();
  if (following) go(longest());
  const still = window.matchMedia('(prefers-reduced-motion: reduce)').matches;
  if (page.autoplay && !still && panes.length && !growing) toggle();
}

watch('page', show);
show();
