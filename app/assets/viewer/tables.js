// The block tables: each request's map from logical to physical blocks, the words in them, and the text so far.

const PER_PAGE = 8; // requests whose tables are drawn at once
const MAX_CHIPS = 16; // blocks of one table
const MAX_WORDS = 8; // of one block
const TEXT_TOKENS = 24; // of the text so far

class Tables {
  constructor(pane, card) {
    Object.assign(this, { pane, card, first: 0, rows: card.querySelector('.rows'), pager: card.querySelector('.pager') });
    this.pager.addEventListener('click', (event) => {
      if (!event.target.dataset.by) return;
      this.first = Math.max(0, this.first + +event.target.dataset.by);
      this.draw(pane.state);
    });
  }

  names() { this.card.querySelector('h4').textContent = say('tables'); }

  draw(state) {
    const all = this.order(state), pages = Math.ceil(all.length / PER_PAGE);
    this.first = Math.min(this.first, Math.max(0, (pages - 1) * PER_PAGE));
    const shown = all.slice(this.first, this.first + PER_PAGE);
    this.drawRows(shown.map((r) => this.row(r, state)));
    this.pager.hidden = pages < 2;
    if (pages > 1)
      this.pager.innerHTML = `<button type="button" data-by="-${PER_PAGE}" ${this.first ? '' : 'disabled'}>${say('less')}</button>` +
        `<span>${this.first + 1}–${this.first + shown.length} ${say('of')} ${all.length}</span>` +
        `<button type="button" data-by="${PER_PAGE}" ${this.first + PER_PAGE < all.length ? '' : 'disabled'}>${say('more')}</button>`;
  }

  drawRows(rows) { this.rows.innerHTML = rows.join('') || `<p class="empty">${say('none')}</p>`; }

  order(state) {
    const doing = Object.keys(state.pos).map(Number);
    return [...new Set([...state.run, ...doing, ...state.swap, ...state.wait, ...state.held, ...state.ended.keys()])];
  }

  status(r, state) {
    if (state.ended.has(r)) return `${say('finished')}: ${state.ended.get(r)}`;
    if (state.swap.includes(r)) return say('swapped');
    if (state.held.includes(r)) return say('held');
    if (state.wait.includes(r)) return say((state.step.pre ?? []).some(([p]) => p === r) ? 'preempted' : 'waiting');
    const pos = state.pos[r];
    return pos?.count ? `${say(pos.decode ? 'decode' : 'prefill')} +${pos.count}` : say('running');
  }

  row(r, state) {
    const { pane } = this, request = pane.view.requests[r], pos = state.pos[r], table = state.tables[r] ?? [];
    const host = (state.host[r] ?? []).map((b) => `<span class="chip host">⇪${b}</span>`).join('');
    const first = table.length > MAX_CHIPS ? table.length - MAX_CHIPS + 2 : 0; // of a long table the head and the tail
    const chips = table.map((block, index) => {
      if (first && index >= 2 && index < first) return index === 2 ? `<span class="chip null">… ${first - 2} …</span>` : '';
      return this.chip(r, block, index, pos, state);
    }).join('');
    return `<div class="row${state.ended.has(r) ? ' done' : ''}" data-request="${esc(request.id)}">
      <div class="rowhead">${pane.badge(r)}<span class="status">${esc(this.status(r, state))}</span>${this.interval(pos)}</div>
      ${chips || host ? `<div class="chips">${chips}${host}</div>` : ''}${this.text(r)}</div>`;
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
    const size = this.pane.view.block_size, from = index * size, end = pos ? pos.start + pos.count : 0;
    const until = Math.min(from + Math.min(size, MAX_WORDS), end);
    let old = '', fresh = ''; // words computed before, and in this step
    for (let p = from; p < until; p++) {
      if (p < pos.start) old += this.word(r, p, state);
      else fresh += this.word(r, p, state);
    }
    const text = old + (fresh && `<span class="now">${fresh}</span>`);
    const holders = this.pane.pool.numHolders(block);
    return `<span class="chip ${this.pane.hue(r)}${holders > 1 ? ' multi' : ''}" data-block="${block}"><span class="at">${index}→<b>${block}</b>` +
      `${holders > 1 ? ` ×${holders}` : ''}</span><span class="words">${text}${Math.min(end - from, size) > MAX_WORDS ? '…' : ''}</span></span>`;
  }

  word(r, position, state) { // text of a token; behind the known ones stand this step's drafts
    const { view, history: { outputs }, shown } = this.pane, prompt = view.requests[r].prompt;
    if (position < prompt.length) return shown[prompt[position]];
    const before = prompt.length || view.requests[r].unknown; // tokens whose text nobody has told
    if (position < before) return '·';
    const known = state.pos[r]?.known ?? before;
    if (position >= known) return shown[state.step.draft?.[r]?.[position - known]] ?? '?';
    return shown[outputs[r][position - before]?.[1]] ?? '·';
  }

  text(r) { // that was generated so far; the tokens of this step are marked, with what else they might have been
    const { history: { outputs }, view, shown } = this.pane, number = Math.min(at, this.pane.last), tokens = outputs[r];
    const count = numUpTo(tokens, number);
    if (!count) return '';
    let text = count > TEXT_TOKENS ? '…' : '';
    for (let i = Math.max(0, count - TEXT_TOKENS); i < count; i++) {
      const [step, p] = tokens[i], piece = view.pieces[p];
      text += step === number ? `${piece.startsWith(' ') ? ' ' : ''}<mark>${visible(piece.trimStart())}</mark>` : shown[p];
    }
    return `<p class="text">${text}</p>${tokens[count - 1][0] === number ? this.candidates(r, count) : ''}`;
  }

  candidates(r, count) {
    const entries = this.pane.view.requests[r].candidates[count - 1];
    if (!entries) return '';
    return `<ol class="cands">${entries.slice(0, 5).map(([text, p]) =>
      `<li><i style="width:${100 * p}%"></i><span>${visible(text)}</span><b>${(100 * p).toFixed(1)} %</b></li>`).join('')}</ol>`;
  }
}

function numUpTo(tokens, number) { // how many of [step, piece], in order of step, came in step `number` or before
  let low = 0, high = tokens.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tokens[middle][0] <= number) low = middle + 1; else high = middle;
  }
  return low;
}
