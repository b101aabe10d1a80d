// The timeline: requests × steps, and three curves. It is drawn once a run; a step only moves the cursor. Of many
// requests those are drawn that can be seen, of many steps as much as there are pixels.

const ROW = 20, CURVE = 58, LANES = 640, SCROLLBAR = 14; // pixels
const SOME = 8; // rows that are drawn at once, and more than can be seen
const HATCHED = ['queued', 'preempted', 'swapped', 'held'];
const duration = (s) => (s === undefined ? '' : s < 0.1 ? `${(1000 * s).toFixed(1)} ms` : `${s.toFixed(2)} s`);

class Timeline {
  constructor(pane, card) {
    Object.assign(this, { pane, card, box: card.querySelector('.gantt') });
    this.box.addEventListener('click', (event) => {
      const box = this.box.querySelector('svg')?.getBoundingClientRect();
      if (!box) return;
      const x = event.clientX - box.left - this.left;
      if (x >= 0) { stop(); go(Math.floor(x / this.unit)); }
    });
  }

  names() {
    const kinds = ['prefill', 'decode', 'queued', ...(this.pane.view.is_static ? ['held'] : []), 'preempted', 'swapped'];
    this.card.querySelector('h4').innerHTML = `${say('timeline')} <small>${say('jump')}</small>`;
    this.card.querySelector('.key').innerHTML =
      kinds.map((kind) => `<span><b class="swatch k-${kind}"></b>${say(kind)}</span>`).join('');
    this.draw();
  }

  fit() { if (this.box.clientWidth !== this.drawnWidth) this.draw(); }

  draw() {
    this.drawnWidth = this.box.clientWidth;
    const width = Math.max(this.drawnWidth, 260), { view, history } = this.pane, rows = view.requests;
    const height = rows.length * ROW, isTall = height > LANES;
    this.left = width > 480 ? 96 : 34;
    this.right = width > 640 ? 132 : 4;
    this.width = isTall ? width - SCROLLBAR : width;
    this.unit = (this.width - this.left - this.right) / (longest() + 1);
    const summary = `${say('timeline')}: ${rows.length} ${say('rows')}, ${history.length} ${say('steps')}`;
    const delays = this.right > 4 ? `<text class="small" x="${this.width - this.right + 8}" y="12">${say('delays')}</text>` : '';
    const region = isTall ? ` tabindex="0" role="group" aria-label="${esc(say('timeline'))}"` : '';
    this.box.innerHTML = `<svg width="${this.width}" height="16" aria-hidden="true">${this.axis()}${delays}</svg>
      <div class="lanes" style="max-height:${LANES}px"${region}><svg width="${this.width}" height="${height}" role="img" aria-label="${esc(summary)}">
      ${this.patterns()}${this.grid(height)}<g></g>${this.forkLine(height)}${this.cursor(height)}</svg></div>
      <svg width="${this.width}" height="${3 * CURVE + 4}" aria-hidden="true">${this.grid(3 * CURVE)}${this.curves(8)}${this.cursor(3 * CURVE)}</svg>`;
    this.lanes = this.box.querySelector('.lanes');
    this.lanes.addEventListener('scroll', () => this.drawLanes());
    this.firstDrawn = null;
    this.drawLanes();
    this.moveCursor(at);
  }

  drawLanes() { // those that can be seen, and some more on either side
    const first = SOME * Math.max(0, Math.floor(this.lanes.scrollTop / ROW / SOME) - 1);
    if (first === this.firstDrawn) return;
    this.firstDrawn = first;
    const rows = this.pane.view.requests.slice(first, first + LANES / ROW + 3 * SOME);
    this.lanes.querySelector('g').innerHTML = rows.map((request, i) => this.row(request, (first + i) * ROW)).join('');
  }

  patterns() {
    const id = `h${this.pane.index}`;
    return `<defs>${HATCHED.map((kind, i) =>
      `<pattern id="${id}${kind}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(${45 + i * 45})">` +
      `<rect width="6" height="6" class="pb-${kind}"></rect><line x1="0" y1="0" x2="0" y2="6" class="pl-${kind}"></line></pattern>`).join('')}</defs>`;
  }

  x(step) { return this.left + step * this.unit; }

  ticks() { // steps that a line is drawn at
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n * this.unit > 28) ?? 2000;
    const begin = firstStep(), ticks = [];
    for (let n = (every - (begin % every)) % every; n <= longest(); n += every) ticks.push(n);
    return ticks;
  }

  axis() { // a number that would run into the heading at the right is left out
    const end = this.width - this.right, isFree = (n) => this.right <= 4 || this.x(n) + 26 <= end;
    return this.ticks().filter(isFree).map((n) => `<text class="small" x="${this.x(n) + 2}" y="12">${n + firstStep()}</text>`).join('');
  }

  grid(height) {
    return this.ticks().map((n) => `<line class="grid" x1="${this.x(n)}" x2="${this.x(n)}" y1="0" y2="${height}"></line>`).join('');
  }

  cursor(height) { return `<rect class="cursor" y="0" width="${Math.max(this.unit, 2)}" height="${height}"></rect>`; }

  forkLine(height) {
    const step = this.pane.view.forked_at;
    if (step === undefined) return '';
    return `<line class="forkline" x1="${this.x(step)}" x2="${this.x(step)}" y1="0" y2="${height}"></line>` +
      `<title>${say('forked')} ${step}</title>`;
  }

  row(request, y) {
    const shape = this.apart(request.segments).map((segment) => this.segment(request, segment, y)).join('');
    const end = request.end === undefined ? ''
      : `<circle class="end" cx="${Math.min(this.x(request.end + 1), this.width - this.right)}" cy="${y + 10}" r="3.5"></circle>`;
    const delays = this.right > 4 ? `<text class="small" x="${this.width - this.right + 8}" y="${y + 14}">${request.ttft_steps ?? '–'} / ` +
      `${request.latency_steps ?? '–'} · ${duration(request.latency_s)}</text>` : '';
    const name = this.left > 60 ? `<text class="small" x="26" y="${y + 14}">${esc(brief(request.id).slice(0, 10))}</text>` : '';
    return `<rect class="ow" style="fill:var(--o${request.number % 8})" x="2" y="${y + 2}" width="20" height="16" rx="4"></rect>` +
      `<text class="letter" x="12" y="${y + 14}">${request.label}</text>${name}${shape}${end}${delays}`;
  }

  apart(segments) { // without those that end within a pixel of the one before: nobody could see them
    let edge = -1;
    return segments.filter(([, start, length]) => {
      const right = this.x(start + length), isSeen = right - edge >= 1;
      if (isSeen) edge = right;
      return isSeen;
    });
  }

  segment(request, [kind, start, length, tokens], y) {
    const x = this.x(start), w = Math.max(length * this.unit - (this.unit > 4 ? 1 : 0), 0.7);
    const paint = HATCHED.includes(kind) ? `fill="url(#h${this.pane.index}${kind})"` : `class="s-${kind}"`;
    const tall = kind === 'decode' || kind === 'idle' ? 8 : 14, begin = start + firstStep();
    const note = kind === 'prefill' && w > 7 * String(tokens).length + 3
      ? `<text class="inbar" x="${x + w / 2}" y="${y + 14}">${tokens}</text>` : '';
    return `<rect ${paint} x="${x}" y="${y + 10 - tall / 2}" width="${w}" height="${tall}" rx="2"><title>${esc(request.id)}: ` +
      `${say(kind)}, ${say('step')} ${begin}${length > 1 ? `–${begin + length - 1}` : ''}${tokens ? `, ${tokens}` : ''}</title></rect>${note}`;
  }

  curves(y) {
    const { view, history } = this.pane, all = view.num_blocks || 1;
    const hits = history.computed.map(([cached, asked]) => (asked ? cached / asked : 0));
    const used = [], filled = [], tokens = [];
    for (const step of view.steps) {
      used.push(step.slots / view.block_size / all);
      filled.push(step.filled / (all * view.block_size));
      tokens.push(Object.values(step.tok ?? {}).reduce((sum, list) => sum + list.length, 0));
    }
    const most = tokens.reduce((a, b) => Math.max(a, b), 1), percent = (value) => `${Math.round(100 * value)} %`;
    const peak = used.reduce((a, b) => Math.max(a, b), 0);
    return this.curve(y, `${say('used')} / ${say('filled')}`, percent(peak), [['area', used], ['line', filled]]) +
      this.curve(y + CURVE, say('hitrate'), percent(hits.at(-1) ?? 0), [['area', hits]]) +
      this.curve(y + 2 * CURVE, say('tokens'), String(most), [['bars', tokens.map((n) => n / most)]]);
  }

  curve(y, title, most, series) {
    const height = 34, base = y + 15 + height, every = Math.max(1, Math.floor(1 / this.unit)); // steps in a pixel
    const shapes = series.map(([kind, values]) => {
      let line = '';
      for (let i = 0; i < values.length; i += every) {
        const v = Math.max(...values.slice(i, i + every)), run = Math.min(every, values.length - i) * this.unit;
        line += `L${this.x(i).toFixed(1)},${(base - v * height).toFixed(1)}h${run.toFixed(2)}`;
      }
      if (kind === 'line') return `<path class="c-line" d="M${this.x(0)},${base}${line}"></path>`;
      return `<path class="c-${kind}" d="M${this.x(0)},${base}${line}V${base}Z"></path>`;
    }).join('');
    return `<text class="small" x="${this.left}" y="${y + 9}">${esc(title)} <tspan class="strong">${esc(most)}</tspan></text>` +
      `<line class="axis" x1="${this.left}" x2="${this.x(Math.max(this.pane.history.length, 1))}" y1="${base}" y2="${base}"></line>${shapes}`;
  }

  moveCursor(number) {
    const x = this.x(Math.min(number, Math.max(this.pane.last, 0)));
    for (const cursor of this.box.querySelectorAll('.cursor')) cursor.setAttribute('x', x);
  }
}
