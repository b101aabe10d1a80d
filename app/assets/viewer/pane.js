// One run on the page: the step in words, and the cards below it.

class Pane {
  constructor(view, index) {
    Object.assign(this, { index });
    this.take(view);
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
    this.pool = new Pool(this, this.$('.poolcard'));
    this.tables = new Tables(this, this.$('.tablecard'));
    this.timeline = new Timeline(this, this.$('.timecard'));
    this.node.addEventListener('pointerover', (event) => {
      const block = event.target.closest('[data-block]');
      light(block ? +block.dataset.block : null, this);
    });
    this.node.addEventListener('pointerleave', () => light(null, this));
  }

  get last() { return this.history.length - 1; }

  take(view) { // also the same run once more, as far as it has come by now
    this.view = view;
    this.history = new History(view);
    this.shown = view.pieces.map(visible);
  }

  get title() { return inLang(page.sides?.[this.index]) || this.view.title; }

  names() { // everything that depends on the language or on the run, but not on the step
    this.$('.name').innerHTML = `${esc(this.title)} <small>${esc(this.view.tier)} · ${esc(this.view.model)} · ` +
      `${this.view.num_blocks} ${say('blocks')} ${this.view.block_size}</small>`;
    this.$('.budget h4').textContent = say('budget');
    this.$('.queuecard h4').textContent = say('queues');
    this.pool.names();
    this.pool.make();
    this.tables.names();
    this.timeline.names();
  }

  fit() { // to the width there is now
    this.node.classList.toggle('wide', this.node.clientWidth >= 900);
    this.timeline.fit();
  }

  draw(number) {
    const over = number > this.last;
    this.state = this.history.at(Math.min(number, this.last));
    this.node.classList.toggle('over', over);
    if (!this.state) { this.$('.say').textContent = say('nosteps'); return; }
    const step = this.state.step;
    this.$('.say').textContent = over ? say('ended') : step.say[lang] ?? step.say.en;
    const reasons = over ? [] : [...(step.pre ?? []), ...(step.ref ?? [])].filter(([, text]) => text);
    this.$('.why').innerHTML = reasons.map(([r, text]) => `<li>${this.letter(r)} ${esc(text)}</li>`).join('');
    this.drawBudget(this.state);
    this.pool.draw(this.state);
    this.tables.draw(this.state);
    this.drawQueues(this.state);
    this.timeline.moveCursor(number);
    if (lit?.pane === this) this.showLit();
  }

  showLit() { // also after a step, which draws the tables anew
    for (const node of this.node.querySelectorAll('.lit')) node.classList.remove('lit');
    if (lit?.pane !== this) return;
    this.pool.cursor = lit.block;
    for (const node of this.node.querySelectorAll(`[data-block="${lit.block}"]`)) node.classList.add('lit');
    this.$('.info').textContent = this.pool.describe(lit.block);
  }

  hue(r) { return hue(this.view.requests[r].number); }

  letter(r) { return `<span class="badge ${this.hue(r)}">${this.view.requests[r].label}</span>`; }

  badge(r) { return `${this.letter(r)}<span class="id" title="${esc(this.view.requests[r].id)}">${esc(brief(this.view.requests[r].id))}</span>`; }

  drawBudget({ step, pos }) {
    const parts = { prefill: 0, decode: 0, accepted: 0, rejected: 0 };
    for (const { count, decode, drafts, kept } of Object.values(pos)) {
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

  drawQueues(state) {
    const queues = {
      running: state.run.filter((r) => !state.ended.has(r)), waiting: state.wait, swapped: state.swap, held: state.held,
      finished: [...state.ended.keys()],
    };
    if (!this.view.is_static) delete queues.held;
    const key = lang + JSON.stringify(queues);
    if (this.queuesKey === key) return;
    this.queuesKey = key;
    this.$('.queues').innerHTML = Object.entries(queues).map(([name, list]) =>
      `<div class="queue" data-queue="${name}"><h5>${say(name)} <b>${list.length}</b></h5><div>${list.slice(0, 24)
        .map((r) => `<span class="who" title="${esc(this.view.requests[r].id)}">${this.badge(r)}</span>`).join('')}${
        list.length > 24 ? `+${list.length - 24}` : ''}</div></div>`).join('');
  }
}
