// Read the payload, draw the sections, and provide helpers for all of them.
"use strict";

// The script of a section that is not made of parts adds an entry {title, draw(root, data)}.
const sections = {};
const light = matchMedia("(prefers-color-scheme: light)");

// The characters that instrument/base/printable.py escapes.
const invisible = "\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180d\\u180f\\u2800\\u3164" +
  "\\ufe00-\\ufe0f\\uffa0\\u{e0100}-\\u{e01ef}";
const unprintable = new RegExp(
  `[\\p{Cc}\\p{Cf}\\p{Cs}\\p{Co}\\p{Cn}\\p{Zl}\\p{Zp}${invisible}]|(?! )\\p{Zs}`, "gu");

function printable(text) {
  return String(text).replace(unprintable, character => {
    const code = character.codePointAt(0);
    const named = {9: "\\t", 10: "\\n", 13: "\\r"}[code];
    const [mark, digits] = code < 0x100 ? ["\\x", 2] : code < 0x10000 ? ["\\u", 4] : ["\\U", 8];
    return named || mark + code.toString(16).padStart(digits, "0");
  });
}

// Create an element. The keys of `properties` are `text`, `class`, listeners such as `onclick`, and
// other attributes. Children are elements, or strings that are shown as text.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") made.textContent = printable(value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : printable(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined) continue;
    made.append(child instanceof Node ? child : printable(child));
  }
  return made;
}

// A number with fixed decimals. Like Python, it rounds a tie to the even digit.
function fixed(value, digits) {
  const rounded = value.toFixed(digits); // rounds a tie up
  const exact = value.toFixed(digits + 30);
  const isTie = exact.endsWith(`5${"0".repeat(29)}`);
  return isTie && /[13579]$/.test(rounded) ? exact.slice(0, -30).replace(/\.$/, "") : rounded;
}

// The next three functions write the numbers of charts as instrument/base/units.py does.
function scaled(value, units, most) {
  for (const [at, [unit, divisor]] of units.entries()) {
    const shown = Math.abs((value / divisor).toPrecision(4));
    if (units[at + 1] && shown * divisor >= units[at + 1][1]) continue;
    const decimals = Math.max(4 - String(Math.trunc(shown)).length, 0);
    return `${fixed(value / divisor, divisor > 1 ? Math.min(decimals, most) : 0)} ${unit}`;
  }
}

function duration(ns) {
  return scaled(ns, [["ns", 1], ["µs", 1e3], ["ms", 1e6], ["s", 1e9]], 3);
}

function bytes(value) {
  return scaled(value, [["B", 1], ["KiB", 1024], ["MiB", 1024 ** 2], ["GiB", 1024 ** 3]], 2);
}

function percent(share) {
  const hasDecimal = share !== 0 && (Math.abs(share) < 0.095 || (share >= 0.995 && share < 1));
  return `${fixed(share * 100, hasDecimal ? 1 : 0)} %`;
}

// The colour of a name. It is the same in the whole page, and dark text is readable on it. Names
// that are drawn first have the most different colours.
const numbers = new Map();

function colourOf(name) {
  if (!numbers.has(name)) numbers.set(name, numbers.size);
  const at = numbers.get(name);
  return `oklch(${0.72 + 0.06 * (at % 3)} 0.1 ${(at * 137.508) % 360})`; // the golden angle
}

// The current value of a variable, such as "--ink", or of a colour with variables, for a canvas.
function themeColour(colour) {
  const probe = element("i", {hidden: true});
  probe.style.color = colour.startsWith("--") ? `var(${colour})` : colour;
  document.body.append(probe);
  const current = getComputedStyle(probe).color;
  probe.remove();
  return current;
}

async function unpacked() {
  const text = document.getElementById("payload").textContent.trim();
  const packed = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The values after "?" in the page's address, if it leads to this section, as in
// "#timeline?from=0&to=9"; else null.
function addressed(name) {
  const [section, values] = location.hash.slice(1).split("?");
  return section === name ? new URLSearchParams(values) : null;
}

function scrollToAddressed() {
  const root = document.getElementById(location.hash.slice(1).split("?")[0]);
  if (root) root.scrollIntoView();
}

// Follow a link within the page. A frame in a notebook has the address of the notebook. So without
// this function, a link would load the notebook into the frame.
function followLink(event) {
  const link = event.target.closest("a[href^='#']");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  location.hash = link.getAttribute("href");
  scrollToAddressed();
}

async function start() {
  const payload = await unpacked();
  const main = document.getElementById("main");
  const contents = document.getElementById("contents");
  main.replaceChildren();
  document.querySelector("#head h1").after(...drawn(payload.head || []));
  for (const [name, data] of Object.entries(payload.sections)) {
    const {title, draw} = sections[name] || {
      title: data.title, draw: root => root.append(...drawn(data.parts).flat().filter(Boolean)),
    };
    contents.append(element("a", {href: `#${name}`, text: title}));
    const root = element("section", {id: name, "aria-labelledby": `${name}-title`});
    root.append(element("h2", {id: `${name}-title`, text: data.heading || title}));
    main.append(root);
    draw(root, data);
  }
  document.getElementById("open-all").addEventListener("click", openAll);
  addEventListener("beforeprint", openAll);
  addEventListener("hashchange", scrollToAddressed);
  document.addEventListener("click", followLink);
  scrollToAddressed();
  document.documentElement.dataset.ready = "true";
}

function openAll() {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
}

addEventListener("DOMContentLoaded", start);
