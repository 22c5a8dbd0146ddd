const CHARTS = JSON.parse(document.getElementById("numbers").textContent);
const TYPES = { B: Uint8Array, H: Uint16Array, I: Uint32Array, f: Float32Array };
const THEMES = {
  light: {
    sides: [[33, 92, 160], [140, 186, 220], [246, 246, 244], [240, 158, 108], [158, 40, 16]],
    ramp: [[244, 247, 250], [186, 212, 234], [92, 156, 208], [29, 105, 172], [8, 43, 97]],
    hues: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7b6bb5", "#8a8d1b"],
    phases: ["#9ecae1", "#dbe3ea", "#08519c", "#4a98cf", "#2171b5", "#c6dbef", "#6baed6", "#0b2f4f", "#eef1f5", "#fdc08a", "#f1e4d8", "#a63603", "#f58a3c", "#d95f0e", "#fddcc0", "#fd8d3c", "#5c1f02", "#f7f1ea", "#a1d99b", "#dde9dc", "#006d2c", "#52b36a", "#31a354", "#c7e9c0", "#74c476", "#00381a", "#edf4ec", "#bcbddc", "#e4e2ec", "#54278f", "#8b86c0", "#756bb1", "#dadaeb", "#9e9ac8", "#2f1450", "#f2eff7"],
  },
  dark: {
    sides: [[96, 172, 236], [44, 92, 140], [32, 40, 48], [158, 84, 40], [255, 164, 96]],
    ramp: [[27, 35, 44], [24, 66, 104], [36, 116, 178], [104, 178, 232], [220, 241, 255]],
    hues: ["#4aa3df", "#f0b429", "#2fbf94", "#e29cc3", "#8fd0f5", "#f58549", "#a99be0", "#c3c64a"],
    phases: ["#2f5f86", "#26303a", "#9fd0f5", "#4b94cc", "#6fb3e6", "#234a68", "#3f7fb0", "#d4ecff", "#1d242c", "#8a5427", "#3a3028", "#ffc796", "#e07b30", "#f79b55", "#6a4220", "#b5652b", "#ffe6d1", "#2a241e", "#2c6b45", "#27332b", "#9fe3b8", "#3fa565", "#63c988", "#20492f", "#348a56", "#d5f7e1", "#1c261f", "#574b86", "#2f2b3a", "#cabff5", "#7f6fcc", "#a193e6", "#3d3468", "#6a5bb0", "#eae3ff", "#22202c"],
  },
};
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif';
const MOST_ROWS = 2000; // of a table made on demand
const PRINTED_PX = 700; // of a chart on paper
const root = document.documentElement, tip = document.getElementById("tip"), live = document.getElementById("live");
const chosen = {}; // by the choice's name: charts that offer the same choice move together
const views = [];
let printing = false;

const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const theme = () => THEMES[isDark() ? "dark" : "light"];
const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
const three = (value) => String(Number(value.toPrecision(3)));
const scaled = (value, units) => {
  const [unit, size] = units.find(([, least]) => Math.abs(three(value)) >= least) || units[units.length - 1];
  return three(value / size) + " " + unit;
};
const FORMATS = {
  s: (value) => (value ? scaled(value, [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]]) : "0 s"),
  bytes: (value) => (value ? scaled(value, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["bytes", 1]]) : "0 bytes"),
  "%": (value) => (100 * value).toFixed(1) + " %",
  share: (value) => value.toFixed(3),
  mean: (value) => three(value),
  "": (value) => String(value),
};
const make = (tag, text, attributes = {}) => {
  const made = Object.assign(document.createElement(tag), attributes);
  if (text !== undefined) made.textContent = text;
  return made;
};
const linear = (part) => (part <= 10 ? part / 3294 : ((part / 255 + 0.055) / 1.055) ** 2.4);
const inkOn = (rgb) => (0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]) > 0.18 ? "#0b1015" : "#ffffff");
const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const ramp = (stops, share) => {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (at - low)));
};
const niceSteps = (from, to, most) => {
  const raw = (to - from) / Math.max(1, most), ten = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map((k) => k * ten).find((size) => size >= raw) || ten;
  const found = [];
  for (let at = Math.ceil(from / step - 1e-9); at * step <= to * (1 + 1e-9); at++) found.push(at * step);
  return found;
};

async function unpack(frame) {
  if (frame.values) return frame;
  const raw = Uint8Array.from(atob(frame.packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer()), values = {};
  let at = 0;
  for (const [name, kind, count] of frame.columns) {
    const Type = TYPES[kind[0]], size = Type.BYTES_PER_ELEMENT, joined = new Uint8Array(count * size);
    for (let plane = 0; plane < size; plane++) for (let i = 0; i < count; i++) joined[i * size + plane] = bytes[at++];
    values[name] = new Type(joined.buffer);
    if (kind[1] === "+") {
      let sum = 0;
      values[name] = Float64Array.from(values[name], (step) => (sum += step));
    }
  }
  frame.values = values;
  return frame;
}
