// Formulas stand in the page as TeX between \( \) or \[ \]; without this script they are still readable.
for (const element of document.querySelectorAll(".arithmatex")) {
  const tex = element.textContent.trim();
  katex.render(tex.slice(2, -2), element, { displayMode: tex.startsWith("\\["), throwOnError: false });
}
