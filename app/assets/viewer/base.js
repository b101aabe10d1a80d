// What all parts of the viewer share: the language, escaping, and the colours of owners.

const MARKS = { copy: '=', in: '↓', hit: '★', evict: '✕', alloc: '+', out: '↑', freed: '−' };
const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&#39;' };

let lang = (navigator.language || 'en').startsWith('zh') ? 'zh' : 'en';
let page = null, panes = [], at = 0, timer = null, speed = 1, lit = null; // lit: { block, pane }

// The line of status around the viewer is there in both languages; this says which of them is shown.
const showLang = () => { document.documentElement.dataset.lang = lang; };

const esc = (text) => String(text).replace(/[&<>"']/g, (c) => ESCAPES[c]);
const say = (key) => LABELS[lang][key];
const inLang = (text) => (text && typeof text === 'object' ? text[lang] ?? text.en : text ?? '');
const fillIn = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
const hue = (number) => `o${number % 8} p${Math.floor(number / 8) % 5}`; // colour and pattern of an owner
const icon = (path) => `<svg viewBox="0 0 20 20" width="20" height="20" aria-hidden="true"><path d="${path}"></path></svg>`;
const visible = (piece) => esc(piece.replace(/\n/g, '↵').replace(/\t/g, '⇥')) || '·';
const brief = (id) => (id.length > 16 ? `${id.slice(0, 8)}…` : id); // a server's ids are long
const longest = () => Math.max(0, ...panes.map((pane) => pane.last));
