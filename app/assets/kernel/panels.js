// The pictures of one access: lanes, slots of the cache, sectors, shared memory, reduction, softmax. Each is a function
// from the block and the number of the access to HTML.

const MAX_WORDS = 512; // of a shared array that are drawn
const MAX_SECTORS = 64;
const LOWEST = -3e38; // what a maximum starts from
const isNumber = (value) => value !== null && value !== undefined && value > LOWEST;
const tidy = (value) => (value === null || value === undefined ? '·' : value <= LOWEST ? '−∞' : Math.abs(value) >= 1e5 ? value.toExponential(0) : String(+(+value).toPrecision(3)));
const heat = (value, most) => (!isNumber(value) || !most ? 0 : Math.min(1, Math.abs(value) / most).toFixed(2));

function laneNames(lanes) { // lanes 0–31, or lanes 0, 8, 16
  const isRun = lanes.every((lane, i) => lane === lanes[0] + i);
  const text = isRun && lanes.length > 1 ? `${lanes[0]}–${lanes.at(-1)}` : lanes.length > 6 ? `${lanes.slice(0, 5).join(', ')}…` : lanes.join(', ');
  return `${say(lanes.length > 1 ? 'lanes' : 'lane')} ${text}`;
}

function tellEvent(block, event) {
  const array = block.array(event), site = block.view.sites[event.site];
  const values = {
    warp: event.warp, lanes: laneNames(event.lanes), did: say(event.did), array: array?.name, count: event.lanes.length,
    width: event.width, cost: event.cost, least: event.least, phase: event.phase, name: site.name,
  };
  if (event.did === 'barrier') return fillIn(say('say_barrier'), values);
  if (event.did === 'warp') return fillIn(say('say_warp'), values);
  if (event.did === 'watch') return fillIn(say('say_watch'), values);
  return fillIn(say(array?.shared ? 'say_shared' : 'say_global'), values);
}

function laneLabel(block, event, i) { // what fits into a lane's cell
  if (event.did === 'barrier') return '▮';
  const array = block.array(event);
  if (!array) return tidy(event.values[i]?.[0]);
  if (array.shared) return String((event.offsets[i] / 4) % 32);
  return block.isCache(event) ? `s${block.slots(event)[i]}` : String(event.offsets[i]);
}

function drawWarps(block, event) {
  const quality = block.quality(event);
  const rows = Array.from({ length: block.numWarps }, (_, warp) => {
    const cells = Array.from({ length: 32 }, (_, lane) => {
      const i = warp === event.warp ? event.lanes.indexOf(lane) : -1;
      const slot = i >= 0 && block.isCache(event) ? ` data-slot="${block.array(event).name}-${block.slots(event)[i]}"` : '';
      return i < 0 ? '<i></i>' : `<i class="q-${quality}"${slot} title="${say('lane')} ${lane}">${esc(laneLabel(block, event, i))}</i>`;
    });
    return `<div class="warp${warp === event.warp ? ' active' : ''}"><b>${warp}</b>${cells.join('')}</div>`;
  });
  return `<div class="lanes">${rows.join('')}</div>` + key(['perfect', 'wasteful', 'bad', 'other'].map((name) => [`q-${name}`, say(name)])) + `<p class="note">${say('cells')}</p>`;
}

function key(entries) {
  return `<div class="key">${entries.map(([kind, text]) => `<span><b class="swatch ${kind}"></b>${esc(text)}</span>`).join('')}</div>`;
}

function drawCache(block, event) {
  const { view } = block, before = block.slotsBefore(event.index), mine = block.slots(event), size = view.block_size;
  const draw = (name) => {
    const here = block.array(event)?.name === name ? mine : [];
    const lanesOf = new Map();
    here.forEach((slot, i) => lanesOf.set(slot, [...(lanesOf.get(slot) ?? []), event.lanes[i]]));
    const blocks = Array.from({ length: view.cache.num_blocks }, (_, number) => {
      const slots = Array.from({ length: size }, (_, i) => drawSlot(block, name, number * size + i, lanesOf, before[name], event));
      const seq = Array.from({ length: size }, (_, i) => block.tokens.get(number * size + i)).find(Boolean)?.[0];
      return `<div class="kvblock"><small>${number}${seq === undefined ? '' : ` ${'AB'[seq]}`}</small><div class="slots">${slots.join('')}</div></div>`;
    });
    return `<div class="cachehalf"><h5>${name}</h5><div class="kvblocks">${blocks.join('')}</div></div>`;
  };
  return draw('k_cache') + draw('v_cache') +
    key([['slot-now', say('now')], ['slot-seen', say('touched')], ['slot-new', say('untouched')], ['slot-free', say('free')]]) + `<p class="note">${say('kvnote')}</p>`;
}

function drawSlot(block, name, slot, lanesOf, before, event) {
  const token = block.tokens.get(slot), lanes = lanesOf.get(slot);
  const kind = lanes ? 'now' : before.has(slot) ? 'seen' : token ? 'new' : 'free';
  const holds = token ? `${say('token')} ${token[1]}, ${say('seq')} ${'AB'[token[0]]}` : say('free');
  const who = lanes ? `: warp ${event.warp}, ${laneNames(lanes)}` : '';
  return `<i class="slot-${kind}" data-slot="${name}-${slot}" title="${say('slot')} ${slot}: ${holds}${who}">${token ? token[1] : ''}</i>`;
}

function drawSectors(block, event) { // the 32-byte sectors that the access moves, and how much of each was asked for
  const array = block.array(event);
  if (!array || array.shared) return `<p class="empty">${say('notglobal')}</p>`;
  const used = new Map();
  event.offsets.forEach((offset) => {
    for (let byte = offset; byte < offset + event.width; byte++) {
      const sector = Math.floor(byte / 32);
      if (!used.has(sector)) used.set(sector, new Set());
      used.get(sector).add(byte % 32);
    }
  });
  const sorted = [...used.entries()].sort(([a], [b]) => a - b);
  const cells = sorted.slice(0, MAX_SECTORS).map(([sector, bytes]) => {
    const words = Array.from({ length: 8 }, (_, word) => `<u class="${[0, 1, 2, 3].some((b) => bytes.has(word * 4 + b)) ? 'on' : ''}"></u>`);
    return `<i title="${array.name} + ${32 * sector}: ${bytes.size} / 32">${words.join('')}</i>`;
  });
  const asked = sorted.reduce((sum, [, bytes]) => sum + bytes.size, 0), share = Math.round((100 * asked) / (32 * sorted.length));
  return `<div class="sectors">${cells.join('')}</div><p class="note">${asked} / ${32 * sorted.length} ${say('used')} (${share} %)${
    sorted.length > MAX_SECTORS ? ` · ${MAX_SECTORS} ${say('of')} ${sorted.length}` : ''}</p>`;
}

function drawShared(block, event) {
  const { view } = block, memory = block.sharedAt(event.index), mine = block.array(event)?.shared ? event : null;
  const touched = new Map(); // word -> lanes
  if (mine) mine.offsets.forEach((offset, i) => {
    for (let j = 0; j < mine.width / 4; j++) touched.set(offset / 4 + j, mine.lanes[i]);
  });
  const arrays = view.arrays.map((array, index) => ({ array, index })).filter(({ array, index }) => array.shared && (memory.has(index) || mine?.array === index));
  if (!arrays.length) return `<p class="empty">${say(view.arrays.some((array) => array.shared) ? 'nothing' : 'noshared')}</p>`;
  return arrays.map(({ array, index }) => {
    const words = memory.get(index) ?? new Map(), last = Math.max(-1, ...words.keys(), ...(mine?.array === index ? touched.keys() : []));
    const most = Math.max(0, ...[...words.values()].filter(isNumber).map(Math.abs));
    const count = Math.min(last + 1, MAX_WORDS), banks = new Map();
    if (mine?.array === index) for (const word of touched.keys()) banks.set(word % 32, (banks.get(word % 32) ?? 0) + 1);
    const cells = Array.from({ length: count }, (_, word) => {
      const isNow = mine?.array === index && touched.has(word), clash = isNow && mine.cost > mine.least && banks.get(word % 32) > 1;
      const value = words.get(word);
      return `<i class="${isNow ? (clash ? 'clash' : 'now') : ''}" style="--heat:${heat(value, most)}" title="${array.name}[${word}], ${say('bank')} ${word % 32}${
        value === undefined ? '' : `: ${value}`}">${value === undefined ? '' : tidy(value)}</i>`;
    });
    return `<h5>${esc(array.name)} <small>${say('banks')}</small></h5><div class="banks">${cells.join('')}</div>`;
  }).join('') + key([['bank-now', say('now')], ['bank-clash', say('conflict')]]);
}

function drawReduction(block, event) { // the levels of this kernel around the access, the present one marked
  const mine = block.levels.filter((level) => level.launch === event.launch && (level.warp ?? event.warp) === event.warp);
  if (!mine.length) return `<p class="empty">${say('noreduction')}</p>`;
  let present = -1;
  mine.forEach((level, i) => { if (level.at <= event.index) present = i; });
  const from = Math.max(0, Math.min(present - 4, mine.length - 9)), shown = mine.slice(from, from + 9);
  return shown.map((level, i) => {
    const most = Math.max(0, ...level.values.filter(isNumber).map(Math.abs)), isNow = from + i === present;
    const cells = level.values.slice(0, 128).map((value, j) =>
      `<i style="--heat:${heat(value, most)}" title="${level.warp === undefined ? `[${level.from[j]}]` : `${say('lane')} ${level.from[j]}`}: ${value}">${
        level.values.length <= 32 ? tidy(value) : ''}</i>`);
    return `<div class="level${isNow ? ' present' : ''}${from + i > present ? ' later' : ''}"><button type="button" data-access="${level.at}">${say('phasen')} ${level.phase}</button>
      <span class="who">${esc(level.name)} · ${level.values.length}</span><div class="cells" style="--n:${Math.max(level.values.length, 1)}">${cells.join('')}</div></div>`;
  }).join('');
}

function drawSoftmax(block, event) {
  const lane = event.lanes[0] ?? 0, found = block.watched(event.index, lane);
  if (!Object.keys(found).length) return `<p class="empty">${say('nowatch')}</p>`;
  return Object.entries(found).map(([name, points]) => {
    const values = points.map(([, value]) => value ?? 0), low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
    const x = (i) => (values.length > 1 ? (i / (values.length - 1)) * 236 + 2 : 120), y = (v) => 50 - ((v - low) / span) * 44;
    const line = values.map((v, i) => `${i ? 'L' : 'M'}${x(i).toFixed(1)},${y(v).toFixed(1)}`).join('');
    return `<div class="watch"><span>${esc(LABELS[lang][name] ?? name)} <small>${fillIn(say('pos'), { lane })}</small></span><b>${tidy(values.at(-1))}</b>
      <svg${values.length < 2 ? ' hidden' : ''} viewBox="0 0 240 54" role="img" aria-label="${esc(name)}: ${values.map(tidy).slice(-12).join(', ')}"><path class="c-line" d="${line}"></path>
      <circle class="end" cx="${x(values.length - 1)}" cy="${y(values.at(-1))}" r="4"></circle></svg></div>`;
  }).join('');
}

function drawHot(block) {
  const most = Math.max(1, ...block.view.hot.map((row) => row.cost));
  return `<table><tbody>${block.view.hot.map((row) => {
    const site = block.view.sites[row.site], times = row.least ? row.cost / row.least : 1;
    const quality = times <= 1.01 ? 'perfect' : times <= 4 ? 'wasteful' : 'bad';
    const target = block.events.find((event) => event.site === row.site && block.array(event)?.name === row.array)?.index;
    const place = `${esc(site.at)} <small>${esc(site.function)}</small>`;
    return `<tr><td>${target === undefined ? place : `<button type="button" data-access="${target}">${place}</button>`}</td>
      <td>${say(row.did)} ${esc(row.array)}</td><td class="barcell"><i class="q-${quality}" style="width:${(100 * row.cost) / most}%"></i></td>
      <td class="num">${row.cost} / ${row.least}</td></tr>`;
  }).join('')}</tbody></table>`;
}

function drawRungs(view) {
  const columns = ['global_instructions', 'sectors', 'coalescing', 'shared_instructions', 'bank_conflicts', 'barriers', 'shuffles', 'shared_bytes', 'threads'];
  const value = (counts, name) => (name === 'coalescing' ? Math.round((100 * counts.fewest_sectors) / Math.max(counts.sectors, 1)) : counts[name]);
  const head = columns.map((name) => `<th scope="col">${say('cols')[name]}</th>`).join('');
  const rows = Object.entries(view.counts).map(([name, counts]) => {
    const cells = counts === null ? `<td colspan="${columns.length}">${say('not')}</td>` : columns.map((column) => {
      const number = value(counts, column);
      return column === 'coalescing'
        ? `<td class="barcell" data-count="${column}"><span class="track"><i class="q-${number > 95 ? 'perfect' : number >= 25 ? 'wasteful' : 'bad'}" style="width:${number}%"></i></span><b>${number} %</b></td>`
        : `<td class="num" data-count="${column}">${number.toLocaleString('en')}</td>`;
    }).join('');
    return `<tr data-rung="${name}"${name === view.rung ? ' class="chosen" aria-current="true"' : ''}><th scope="row"><button type="button"${
      counts === null ? ' disabled' : ''}>${name}</button></th>${cells}</tr>`;
  });
  return `<table class="rungs"><thead><tr><th scope="col">${say('rung')}</th>${head}</tr></thead><tbody>${rows.join('')}</tbody></table>`;
}
