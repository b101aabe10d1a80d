// What if? A small form below the controls: options and values for another run, from the step that is shown. Python
// decides what can change in mid-run (`page.options`), runs it and hands over a page with both runs.

class WhatIf {
  constructor(button, form) {
    Object.assign(this, { button, form, changes: [] });
    button.addEventListener('click', () => this.toggle(form.hidden));
    form.addEventListener('submit', (event) => { event.preventDefault(); this.submit(); });
    form.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape') return;
      this.toggle(false);
      button.focus();
    });
    form.addEventListener('input', (event) => this.onInput(event.target));
    form.addEventListener('click', (event) => {
      const what = event.target.closest('[data-what]')?.dataset;
      if (what?.what === 'add') this.add();
      if (what?.what === 'drop') { this.changes.splice(+what.index, 1); this.draw(); }
    });
  }

  get side() { return Math.min(this.chosenSide ?? 0, page.runs.length - 1); }

  get values() { return page.runs[this.side]?.settings; }

  get done() { return page.runs.every((run) => run.is_done); }

  names() { // also when runs have grown or ended
    this.button.textContent = say('whatif');
    this.button.disabled = !page.runs.some((run) => run.settings) || !this.done;
    this.button.title = this.button.disabled ? say(this.done ? 'norequests' : 'notyet') : '';
    if (this.button.disabled) this.toggle(false);
    else if (!this.form.hidden) this.draw();
  }

  toggle(open) {
    this.form.hidden = !open;
    this.button.setAttribute('aria-expanded', String(open));
    if (!open) return;
    stop();
    if (!this.changes.length) this.changes = [this.fresh('block_size')];
    this.draw();
    this.form.querySelector('select')?.focus();
  }

  option(name) { return page.options.find((option) => option.name === name); }

  fresh(name) { return { name, value: this.suggestion(this.option(name), this.values[name]) }; }

  suggestion(option, value) { // something else than the run has
    if (option.kind === 'switch') return !value;
    if (option.kind === 'choice') return option.choices.find((choice) => choice !== value);
    if (option.name === 'block_size') return value === 8 ? 16 : 8;
    return value > option.least ? Math.max(option.least, Math.ceil(value / 2)) : value + 4;
  }

  add() {
    const used = this.changes.map((change) => change.name);
    const next = page.options.find((option) => !used.includes(option.name));
    if (next) this.changes.push(this.fresh(next.name));
    this.draw();
    this.form.querySelectorAll('.change select.what')[this.changes.length - 1]?.focus();
  }

  onInput(target) {
    if (target.matches('.of')) { this.chosenSide = +target.value; this.draw(); return; }
    const change = this.changes[+target.dataset.index];
    if (!change) return;
    if (target.matches('.what')) {
      Object.assign(change, this.fresh(target.value));
      this.draw();
      this.form.querySelectorAll('.change select.what')[+target.dataset.index]?.focus();
      return;
    }
    const kind = this.option(change.name).kind;
    change.value = kind === 'number' ? Number(target.value) : kind === 'switch' ? target.value === 'true' : target.value;
    this.drawNote();
  }

  draw() {
    const sides = page.runs.map((run, i) => [i, panes[i].title, run.settings]).filter(([, , settings]) => settings);
    const of = sides.length < 2 ? '' : `<label>${say('ofrun')} <select class="of">${sides.map(([i, title]) =>
      `<option value="${i}"${i === this.side ? ' selected' : ''}>${esc(title)}</option>`).join('')}</select></label>`;
    this.form.innerHTML = `<fieldset><legend></legend>${of}${this.changes.map((change, i) => this.row(change, i)).join('')}
      <div class="actions"><button type="button" data-what="add">${say('and')}</button>
      <button type="submit" class="go">${say('dofork')}</button></div></fieldset><p class="note" role="status"></p>`;
    this.drawNote();
  }

  row(change, index) {
    const groups = [[true, say('midrun')], [false, say('whole')]].map(([inMidRun, title]) =>
      `<optgroup label="${esc(title)}">${page.options.filter((option) => option.in_mid_run === inMidRun).map(({ name }) =>
        `<option value="${name}"${name === change.name ? ' selected' : ''}>${esc(say('options')[name] ?? name)}</option>`).join('')}</optgroup>`);
    const drop = this.changes.length < 2 ? ''
      : `<button type="button" data-what="drop" data-index="${index}" aria-label="${say('drop')} ${change.name}">×</button>`;
    return `<div class="change"><select class="what" data-index="${index}" aria-label="${say('option')}">${groups.join('')}</select>
      <span aria-hidden="true">=</span>${this.field(change, index)}<span class="was">${say('was')} ${esc(this.values[change.name])}</span>${drop}</div>`;
  }

  field({ name, value }, index) {
    const option = this.option(name), label = `aria-label="${esc(name)}" data-index="${index}"`;
    if (option.kind === 'number')
      return `<input type="number" ${label} min="${option.least}" step="1" value="${value}" required>`;
    const choices = option.kind === 'switch' ? ['true', 'false'] : option.choices;
    return `<select ${label}>${choices.map((choice) =>
      `<option${choice === String(value) ? ' selected' : ''}>${choice}</option>`).join('')}</select>`;
  }

  drawNote() {
    if (this.form.hidden || !this.form.querySelector('legend')) return;
    const whole = this.changes.filter((change) => !this.option(change.name).in_mid_run).map((change) => change.name);
    this.form.querySelector('legend').textContent = whole.length ? say('fork_whole') : fillIn(say('fork_from'), { step: at });
    this.form.querySelector('.note').textContent = whole.length
      ? fillIn(say('note_whole'), { names: whole.join(', ') }) : fillIn(say('note_from'), { step: at });
  }

  submit() {
    const changes = Object.fromEntries(this.changes.map(({ name, value }) => [name, value]));
    trigger('fork', { side: this.side, step: at, changes });
  }
}
