// The physical pool. The nodes of a cell are made once; a step changes those of the cells in which something changed.

const MAX_CELLS = 2048; // blocks that are drawn
const DENSE_FROM = 160; // from so many blocks on the cells are small and say less

class Pool {
  constructor(pane, card) {
    Object.assign(this, { pane, card, node: card.querySelector('.pool'), cells: [], cursor: 1 });
    this.node.addEventListener('keydown', (event) => this.onKey(event));
    this.node.addEventListener('focus', () => this.node.matches(':focus-visible') && light(this.cursor, pane));
    this.node.addEventListener('blur', () => light(null, pane));
  }

  onKey(event) {
    const row = Math.max(1, Math.round(this.node.clientWidth / (this.cells[0]?.node.offsetWidth + 4 || 48)));
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.cursor = Math.min(Math.max(1, this.cursor + move), this.cells.length);
    light(this.cursor, this.pane);
    this.cells[this.cursor - 1]?.node.scrollIntoView({ block: 'nearest' });
  }

  names() {
    this.card.querySelector('h4').textContent = say('pool');
    this.node.setAttribute('aria-label', `${say('pool')}. ${say('hint')}`);
    this.card.querySelector('.info').textContent = say('hint');
    this.card.querySelector('.marks').innerHTML = Object.entries(MARKS)
      .map(([name, mark]) => `<span><b class="cell ev-${name}">${mark}</b>${say(name)}</span>`).join('') +
      `<span><b class="cell">#</b>${say('cached')}</span><span><b class="cell">q1</b>${say('next_out')}</span>`;
  }

  make() { // cells for the blocks that there are
    const count = Math.min(this.pane.view.num_blocks, MAX_CELLS);
    if (count === this.cells.length) return;
    this.dense = count > DENSE_FROM;
    this.node.classList.toggle('dense', this.dense);
    this.cells = Array.from({ length: count }, (_, i) => this.makeCell(i + 1));
    this.node.replaceChildren(...this.cells.map((cell) => cell.node));
  }

  makeCell(block) {
    const node = document.createElement('div'), cell = { node, key: '', place: '' };
    node.dataset.block = block;
    node.className = 'cell free';
    for (const name of this.dense ? ['own', 'mark'] : ['no', 'own', 'sub', 'hash', 'mark']) {
      cell[name] = document.createElement('span');
      cell[name].className = name;
      node.append(cell[name]);
    }
    if (cell.no) cell.no.textContent = block;
    cell.fill = document.createElement('i');
    cell.fill.className = 'fill';
    cell.level = document.createElement('i');
    cell.fill.append(cell.level);
    node.append(cell.fill);
    return cell;
  }

  draw(state) {
    const { cells, pane } = this, size = pane.view.block_size, marks = marksOf(state.step);
    this.count(state, size);
    for (let i = 0; i < cells.length; i++) {
      const block = i + 1, cell = cells[i], mark = marks.get(block) ?? '', hash = state.hash[block] !== undefined;
      const key = `${this.holders[block]}|${this.fills[block]}|${mark}|${hash}`;
      if (cell.key === key) continue;
      cell.key = key;
      this.drawCell(cell, this.heldBy(block), this.fills[block] / size, mark, hash);
    }
    if (!this.dense) this.drawPlaces(state.free);
  }

  count(state, size) { // by block: its holders, and how many of its slots hold a token
    const length = this.pane.view.num_blocks + 1;
    this.holders = new Array(length); // nothing, a request, or several
    this.fills = new Uint32Array(length);
    for (const r in state.tables) {
      const table = state.tables[r], pos = state.pos[r], computed = pos ? pos.start + pos.count : 0;
      for (let index = 0; index < table.length; index++) {
        const block = table[index];
        if (!block || block >= length) continue;
        const held = this.holders[block];
        this.holders[block] = held === undefined ? +r : Array.isArray(held) ? [...held, +r] : [held, +r];
        const fill = Math.min(Math.max(computed - index * size, 0), size);
        if (fill > this.fills[block]) this.fills[block] = fill;
      }
    }
  }

  heldBy(block) { return [this.holders?.[block] ?? []].flat(); }

  drawCell(cell, held, fill, mark, hash) {
    const owner = held.length === 0 ? 'free' : held.length > 1 ? 'shared' : this.pane.hue(held[0]);
    const lit = cell.node.classList.contains('lit');
    cell.node.className = `cell ${owner}${hash ? ' hashed' : ''}${mark ? ` ev-${mark}` : ''}${lit ? ' lit' : ''}`;
    cell.node.style.background = held.length > 1 ? this.stripes(held) : '';
    const names = held.map((r) => this.pane.view.requests[r].label);
    cell.own.textContent = names.length > 3 ? `${names[0]}+${names.length - 1}` : names.join('');
    cell.mark.textContent = mark ? MARKS[mark] : '';
    cell.fill.hidden = held.length === 0;
    cell.level.style.width = `${100 * fill}%`;
    if (this.dense) return;
    cell.hash.textContent = hash ? '#' : '';
    cell.place = held.length > 1 ? `×${held.length}` : '';
    cell.sub.textContent = cell.place;
  }

  drawPlaces(free) { // in the free queue: one block taken moves all behind it
    free.forEach((block, i) => {
      const cell = this.cells[block - 1], place = `q${i + 1}`;
      if (!cell || cell.place === place) return;
      cell.place = place;
      cell.sub.textContent = place;
    });
  }

  stripes(held) { // a shared block shows the colours of its first four holders
    const some = held.slice(0, 4), share = 100 / some.length;
    const stops = some.map((r, i) => `var(--o${this.pane.view.requests[r].number % 8}) ${i * share}% ${(i + 1) * share}%`);
    return `linear-gradient(90deg, ${stops.join(', ')})`;
  }

  numHolders(block) { return Math.max(1, this.heldBy(block).length); }

  describe(block) {
    const { view, state } = this.pane, words = [`${say('block')} ${block}`];
    if (!state || !this.holders) return words[0];
    const held = this.heldBy(block), hash = state.hash[block];
    if (held.length) {
      words.push(`${say('holders')} ${held.map((r) => view.requests[r].id).join(', ')} (×${held.length})`);
      words.push(`${this.fills[block]}/${view.block_size} ${say('slots')}`);
    } else {
      const place = state.free.indexOf(block) + 1;
      words.push(say('free'), place === 1 ? say('next_out') : `${say('queue')} ${place}`);
    }
    words.push(hash ? `${say('hash')} ${hash}${held.length ? '' : ` (${say('cached')})`}` : say('nohash'));
    return words.join(' · ');
  }
}

function light(block, pane) { // one block, wherever it is drawn in its pane
  if (block === (lit?.block ?? null) && pane === (lit?.pane ?? pane)) return;
  const before = lit?.pane;
  lit = block === null ? null : { block, pane };
  for (const one of new Set([before, pane])) one?.showLit();
}
