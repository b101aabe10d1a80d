// A run, unfolded: the steps arrive as differences from one another. One state is at hand, that of the step that is shown;
// the next follows from it by what the step changes, any other from the keyframe before it. So neither a step nor the
// memory grows with steps times requests.

const KEYFRAME_INTERVAL = 64; // steps

function decodeOrder(before, pieces) {
  const after = [];
  for (const piece of pieces) {
    if (Array.isArray(piece)) for (let i = piece[0]; i < piece[1]; i++) after.push(before[i]);
    else after.push(piece);
  }
  return after;
}

class History {
  constructor(view) {
    this.steps = view.steps;
    this.length = view.steps.length;
    this.outputs = view.requests.map(() => []); // per request: [step, piece] of each token
    this.computed = []; // by step: tokens found in the cache so far, and tokens of prompts so far
    this.keyframes = [];
    this.number = -1;
    this.state = { run: [], wait: [], swap: [], held: [], tables: {}, host: {}, free: [], hash: [], pos: {}, ended: new Map() };
    let cached = 0, asked = 0;
    for (const [number, step] of this.steps.entries()) {
      this.advance();
      if (number % KEYFRAME_INTERVAL === 0) this.keyframes.push(copyOf(this.state));
      for (const [r, pieces] of Object.entries(step.tok ?? {})) for (const p of pieces) this.outputs[r].push([number, p]);
      for (const n of Object.values(step.cached ?? {})) { cached += n; asked += n; }
      for (const row of step.sched) if (row[2] === 0) asked += row[1];
      this.computed.push([cached, asked]);
    }
  }

  at(number) { // the state when step `number` is done, until somebody asks for another
    if (!this.length) return undefined;
    const keyframe = Math.floor(number / KEYFRAME_INTERVAL);
    if (number < this.number || keyframe * KEYFRAME_INTERVAL > this.number) {
      this.state = copyOf(this.keyframes[keyframe]);
      this.number = keyframe * KEYFRAME_INTERVAL;
    }
    while (this.number < number) this.advance();
    return this.state;
  }

  advance() {
    this.number += 1;
    change(this.state, this.steps[this.number]);
  }
}

const copyTables = (tables) => Object.fromEntries(Object.entries(tables).map(([r, table]) => [r, table.slice()]));

function copyOf(state) { // what `change` changes in place is not shared
  return { ...state, tables: copyTables(state.tables), hash: state.hash.slice(), ended: new Map(state.ended) };
}

function change(state, step) { // into the one after `step`
  state.step = step;
  state.pos = positions(step, state.pos);
  for (const name of ['run', 'wait', 'swap', 'held']) if (step[name]) state[name] = step[name];
  for (const [r, blocks] of Object.entries(step.grow ?? {})) state.tables[r].push(...blocks);
  for (const [r, table] of Object.entries(step.tables ?? {})) state.tables[r] = table.slice();
  for (const r of step.gone ?? []) delete state.tables[r];
  if (step.host || Object.keys(state.host).length)
    state.host = Object.fromEntries(
      Object.entries({ ...state.host, ...step.host }).filter(([r]) => state.swap.includes(+r)));
  if (step.free) state.free = decodeOrder(state.free, step.free);
  for (const [block, text] of step.hash ?? []) state.hash[block] = text ?? undefined;
  for (const [r, reason] of step.fin ?? []) state.ended.set(r, reason);
}

function positions(step, before) { // by request: what is computed, in this step, and still to come
  const pos = {};
  for (const row of step.sched) {
    if (Array.isArray(row)) {
      const [r, count, decode, start, known, drafts, kept] = row;
      pos[r] = { count, decode, start, known, drafts, kept };
    } else { // it decodes on
      const { count, start, known } = before[row];
      pos[row] = { count: 1, decode: 1, start: start + count, known: known + 1, drafts: 0, kept: 0 };
    }
  }
  for (const [r, start, known] of step.idle ?? []) pos[r] = { count: 0, decode: 0, start, known, drafts: 0, kept: 0 };
  return pos;
}

function marksOf(step) { // by block: what became of it in this step, the most telling of several
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
