// A run, unfolded: the steps arrive as differences from one another; here they become whole states, which share all
// that did not change.

const NOTHING = { run: [], wait: [], swap: [], held: [], tables: {}, host: {}, free: [], hash: {}, pos: {}, ended: new Map() };

function decodeOrder(before, pieces) {
  const after = [];
  for (const piece of pieces) {
    if (Array.isArray(piece)) for (let i = piece[0]; i < piece[1]; i++) after.push(before[i]);
    else after.push(piece);
  }
  return after;
}

function unfold(view) {
  let before = NOTHING;
  const outputs = view.requests.map(() => []); // per request: [step, piece] of each token
  const states = view.steps.map((step, number) => {
    before = stateAfter(before, step);
    for (const [r, pieces] of Object.entries(step.tok ?? {})) for (const p of pieces) outputs[r].push([number, p]);
    return before;
  });
  return { view, states, outputs, shown: view.pieces.map(visible) };
}

function stateAfter(before, step) {
  const state = { ...before, step, pos: positions(step) };
  for (const name of ['run', 'wait', 'swap', 'held']) if (step[name]) state[name] = step[name];
  if (step.tables || step.gone) {
    state.tables = { ...before.tables, ...step.tables };
    for (const r of step.gone ?? []) delete state.tables[r];
  }
  if (step.host || Object.keys(before.host).length)
    state.host = Object.fromEntries(
      Object.entries({ ...before.host, ...step.host }).filter(([r]) => state.swap.includes(+r)));
  if (step.free) state.free = decodeOrder(before.free, step.free);
  if (step.hash) {
    state.hash = { ...before.hash };
    for (const [block, text] of step.hash) if (text === null) delete state.hash[block]; else state.hash[block] = text;
  }
  if (step.fin) state.ended = new Map([...before.ended, ...step.fin]);
  return state;
}

function positions(step) { // by request: what is computed, in this step, and still to come
  const pos = {};
  for (const [r, count, decode, start, known, drafts, kept] of step.sched) pos[r] = { count, decode, start, known, drafts, kept };
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
