// Loaded between Mermaid and the theme, whose style sheet for diagrams does not reach everything: this Mermaid writes a
// prefix before the names of arrow heads.
const EXTRA = `
  [id$="head"] path { fill: var(--md-mermaid-edge-color); stroke: var(--md-mermaid-edge-color); }
  .actor-line { stroke: var(--md-default-fg-color--lighter); }
`;
const initialize = mermaid.initialize;
mermaid.initialize = (config) => initialize({ ...config, themeCSS: (config.themeCSS ?? "") + EXTRA });
