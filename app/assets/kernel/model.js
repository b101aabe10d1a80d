// A traced block, unfolded: events as objects, what they touch, and what shared memory holds after each of them.

const WIDTHS = { float32: 4, int32: 4, int64: 8, float16: 2, bfloat16: 2, float64: 8, int8: 1, uint8: 1 };

function numbers(row) { // of [first, step, count] or {all}
  if (row.all) return row.all;
  const [first, step, count] = row;
  return Array.from({ length: count }, (_, i) => first + i * step);
}

function unfoldEvent([launch, phase, warp, did, site, width, lanes, array, offsets, values, cost, least], index) {
  return { index, launch, phase, warp, did, site, width, lanes: numbers(lanes), array, offsets: numbers(offsets), values, cost, least };
}

class Block {
  constructor(view) {
    this.view = view;
    this.events = view.events.map(unfoldEvent);
    this.tokens = new Map(view.cache.tokens.map(([slot, seq, position]) => [slot, [seq, position]]));
    this.slotBytes = view.head_dim * view.kv_heads * WIDTHS[view.dtype];
    this.numWarps = Math.max(1, ...view.launches.map((launch) => Math.ceil(launch.block.reduce((a, b) => a * b) / 32)));
    this.phases = this.events.filter((event, i) => !i || this.isNewPhase(i)).map((event) => event.index);
    this.levels = this.findLevels();
  }

  isNewPhase(i) {
    const [one, two] = [this.events[i - 1], this.events[i]];
    return one.phase !== two.phase || one.launch !== two.launch;
  }

  array(event) { return event.array < 0 ? null : this.view.arrays[event.array]; }

  isCache(event) { return ['k_cache', 'v_cache'].includes(this.array(event)?.name); }

  slots(event) { // physical slots, one a lane
    return this.isCache(event) ? event.offsets.map((offset) => Math.floor(offset / this.slotBytes)) : [];
  }

  quality(event) { // of an access: how many times the fewest sectors or passes it takes
    if (event.array < 0 || !event.least) return 'other';
    const times = event.cost / event.least;
    return times <= 1.01 ? 'perfect' : times <= 4 ? 'wasteful' : 'bad';
  }

  sharedAt(number) { // by array: Map word -> value, after event `number`, and who wrote it
    const memory = new Map(), launch = this.events[number].launch;
    for (let i = 0; i <= number; i++) {
      const event = this.events[i];
      if (event.launch !== launch || event.did !== 'write' || !this.array(event)?.shared) continue;
      if (!memory.has(event.array)) memory.set(event.array, new Map());
      const words = memory.get(event.array);
      event.offsets.forEach((offset, lane) => (event.values[lane] ?? []).forEach((value, j) => words.set(offset / 4 + j, value)));
    }
    return memory;
  }

  slotsBefore(number) { // physical slots of each cache that were read before
    const seen = { k_cache: new Set(), v_cache: new Set() };
    for (let i = 0; i < number; i++)
      if (this.isCache(this.events[i])) for (const slot of this.slots(this.events[i])) seen[this.array(this.events[i]).name].add(slot);
    return seen;
  }

  watched(number, lane) { // by name: [event, value] of one lane of the warp of event `number`, up to there
    const { warp, launch } = this.events[number], found = {};
    for (let i = 0; i <= number; i++) {
      const event = this.events[i];
      if (event.did !== 'watch' || event.warp !== warp || event.launch !== launch) continue;
      const at = event.lanes.indexOf(lane);
      if (at >= 0) (found[this.view.sites[event.site].name] ??= []).push([i, event.values[at]?.[0]]);
    }
    return found;
  }

  // A level of a reduction: a shuffle of a warp, or what a phase of `block_reduce_...` writes into a shared
  // array, so that a tree in shared memory shows as rows of which each is half as long as the one before.
  findLevels() {
    const levels = [], written = new Map();
    for (const event of this.events) {
      const name = event.did === 'warp' ? this.view.sites[event.site].name : '';
      if (name.startsWith('__shfl'))
        levels.push({ at: event.index, launch: event.launch, phase: event.phase, warp: event.warp, name, from: event.lanes, values: event.values.map((v) => v[0]) });
      const array = this.array(event);
      if (event.did !== 'write' || !array?.shared || !this.view.sites[event.site].function.match(/(block|warp)_reduce/)) continue;
      const key = `${event.launch}|${event.phase}|${event.array}`;
      if (!written.has(key)) {
        const level = { at: event.index, launch: event.launch, phase: event.phase, name: array.name, from: [], values: [] };
        written.set(key, level);
        levels.push(level);
      }
      const level = written.get(key);
      level.last = event.index;
      event.offsets.forEach((offset, lane) => { level.from.push(offset / 4); level.values.push(event.values[lane]?.[0]); });
    }
    return levels;
  }
}
