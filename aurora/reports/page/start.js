function choose(name, at) {
  chosen[name] = at;
  views.filter((view) => view.seen).forEach((view) => view.refresh());
}

const button = document.getElementById("theme");
function dress(wanted) {
  if (wanted) root.dataset.theme = wanted;
  button.textContent = isDark() ? "Light theme" : "Dark theme";
  views.filter((view) => view.seen).forEach((view) => view.draw());
}
button.addEventListener("click", () => dress(isDark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dress());
document.querySelectorAll("[data-chart]").forEach((figure) => {
  views.push(new { heat: Heat, bars: Bars, spans: Spans }[CHARTS[figure.dataset.chart].kind](figure));
});
dress();
