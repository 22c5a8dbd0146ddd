function choose(name, at) {
  chosen[name] = at;
  views.forEach((view) => view.refresh());
}

const button = document.getElementById("theme");
function dress(wanted) {
  if (wanted) root.dataset.theme = wanted;
  button.textContent = isDark() ? "Light theme" : "Dark theme";
  views.forEach((view) => view.draw());
}
button.addEventListener("click", () => dress(isDark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => printing || dress());

let before; // of printing: the theme, and what was closed
addEventListener("beforeprint", () => {
  before = { theme: root.dataset.theme, closed: document.querySelectorAll("details:not([open])") };
  before.closed.forEach((details) => (details.open = true));
  printing = true;
  dress("light");
});
addEventListener("afterprint", () => {
  before.closed.forEach((details) => (details.open = false));
  printing = false;
  if (!before.theme) delete root.dataset.theme;
  dress(before.theme);
});

document.querySelectorAll("[data-chart]").forEach((figure) => {
  views.push(new { heat: Heat, bars: Bars, spans: Spans }[CHARTS[figure.dataset.chart].kind](figure));
});
dress();
const held = make("iframe", undefined, { hidden: true }); // while it is open, the load event waits: what prints then finds charts
document.body.append(held);
held.contentDocument.open();
Promise.allSettled(views.map((view) => view.refresh())).then(() => held.remove());
