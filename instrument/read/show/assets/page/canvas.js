// Helpers for drawing on a canvas: sizes, colours, texts, and a time axis.
"use strict";

const labelFont = "11px system-ui, sans-serif";

// Set the size of a canvas in CSS pixels. Return its context, whose unit is one CSS pixel.
function fitted(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = labelFont;
  context.textBaseline = "middle";
  return context;
}

// Return a function that converts CSS colours to "rgb(…)", which a canvas parses fastest.
function colourResolver() {
  const canvas = element("canvas", {width: 1, height: 1});
  const context = canvas.getContext("2d", {willReadFrequently: true});
  const known = new Map();
  return colour => {
    if (!known.has(colour)) {
      context.fillStyle = colour.includes("var(") ? themeColour(colour) : colour;
      context.fillRect(0, 0, 1, 1);
      const [red, green, blue] = context.getImageData(0, 0, 1, 1).data;
      known.set(colour, `rgb(${red},${green},${blue})`);
    }
    return known.get(colour);
  };
}

// Write a text into a box; cut the text to the width of the box.
function fillLabel(context, text, x, y, width) {
  const letter = 6;
  const fits = Math.floor((width - 6) / letter);
  if (fits < 2) return;
  context.fillText(text.length <= fits ? text : `${text.slice(0, fits - 1)}…`, x + 3, y, width - 4);
}

// Return a function that requests a repaint. Several requests before the next frame paint once. A
// change of the theme or of the size of an element repaints, too.
function painter(paint, watched) {
  let isWaiting = false;
  const repaint = () => {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      paint();
    });
  };
  new ResizeObserver(repaint).observe(watched);
  light.addEventListener("change", repaint);
  return repaint;
}

// Let an axis show the times from `begin` to `end`, limited to its `first` and `last` time.
function showSpan(axis, begin, end) {
  const least = Math.min(50, axis.last - axis.first);
  const length = Math.min(Math.max(end - begin, least), axis.last - axis.first);
  const middle = (begin + end) / 2;
  axis.begin = Math.min(Math.max(middle - length / 2, axis.first), axis.last - length);
  axis.end = axis.begin + length;
}

// Zoom by a factor. The time `at` stays at the same position on the screen.
function zoomSpan(axis, factor, at) {
  showSpan(axis, at - (at - axis.begin) * factor, at + (axis.end - at) * factor);
}

function panSpan(axis, ns) {
  showSpan(axis, axis.begin + ns, axis.end + ns);
}

// Round times on an axis, at least `pixels` apart, each with its text in ms.
function ticks(axis, width, pixels = 90) {
  const least = ((axis.end - axis.begin) * pixels) / width;
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const distance = [1, 2, 5, 10].map(each => each * power).find(each => each >= least) || least;
  const decimals = Math.min(Math.max(6 - Math.floor(Math.log10(distance)), 0), 6);
  const found = [];
  for (let k = Math.ceil(axis.begin / distance); k * distance <= axis.end; k += 1) {
    const text = ((k * distance) / 1e6 + 0).toLocaleString("en", {
      minimumFractionDigits: decimals, maximumFractionDigits: decimals,
    });
    found.push([k * distance, `${text} ms`]);
  }
  return found;
}

// The time at the pointer.
function timeAt(canvas, axis, event) {
  const box = canvas.getBoundingClientRect();
  return axis.begin + ((event.clientX - box.left) / box.width) * (axis.end - axis.begin);
}

// Zoom an axis around the pointer with Ctrl and the wheel, and move it by dragging or by a sideways
// wheel.
function moveByPointer(canvas, axis, changed, {scroller = null, clicked = () => {}} = {}) {
  canvas.addEventListener("wheel", event => {
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (event.ctrlKey || event.metaKey) {
      zoomSpan(axis, Math.exp(event.deltaY * 0.005), timeAt(canvas, axis, event));
    } else if (isSideways) {
      const pixels = event.deltaX || event.deltaY;
      panSpan(axis, (pixels * (axis.end - axis.begin)) / canvas.clientWidth);
    } else {
      return; // let the page scroll
    }
    event.preventDefault();
    changed();
  }, {passive: false});
  let dragged = null;
  canvas.addEventListener("pointerdown", event => {
    dragged = {x: event.clientX, y: event.clientY, hasMoved: false};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (!dragged) return;
    const [x, y] = [event.clientX - dragged.x, event.clientY - dragged.y];
    if (!dragged.hasMoved && Math.hypot(x, y) < 4) return;
    panSpan(axis, (-x * (axis.end - axis.begin)) / canvas.clientWidth);
    if (scroller) scroller.scrollTop -= y;
    dragged = {x: event.clientX, y: event.clientY, hasMoved: true};
    changed();
  });
  canvas.addEventListener("pointerup", event => {
    if (dragged && !dragged.hasMoved) clicked(event);
    dragged = null;
  });
  canvas.addEventListener("pointercancel", () => { dragged = null; });
}

// Move an axis by a key: arrows or A and D pan, + and - or W and S zoom. Return whether the key
// moves the axis.
function moveByKey(axis, key) {
  const length = axis.end - axis.begin;
  const pan = {ArrowLeft: -1, a: -1, ArrowRight: 1, d: 1}[key];
  const zoom = {"+": 1 / 1.5, "=": 1 / 1.5, w: 1 / 1.5, "-": 1.5, s: 1.5}[key];
  if (pan) panSpan(axis, (pan * length) / 6);
  if (zoom) zoomSpan(axis, zoom, axis.begin + length / 2);
  return Boolean(pan || zoom);
}

// Show lines of text in a box beside the pointer: those that `linesAt(event)` returns, if any.
function tooltip(root, canvas, linesAt) {
  const box = element("div", {class: "tooltip", hidden: true, "aria-hidden": "true"});
  root.append(box);
  canvas.addEventListener("pointerleave", () => { box.hidden = true; });
  canvas.addEventListener("pointermove", event => {
    const lines = linesAt(event);
    box.hidden = !lines.length;
    box.replaceChildren(...lines.map(text => element("div", {text})));
    const frame = root.getBoundingClientRect();
    const left = Math.min(event.clientX - frame.left + 14, frame.width - box.offsetWidth);
    box.style.left = `${Math.max(left, 0)}px`;
    box.style.top = `${event.clientY - frame.top + 16}px`;
  });
}

// The values of a column that holds differences: its running sums.
function summed(differences) {
  const found = new Float64Array(differences.length);
  let total = 0;
  for (let at = 0; at < found.length; at += 1) {
    total += differences[at];
    found[at] = total;
  }
  return found;
}

// The first index from `low` to `high` at which a sorted column is at least `wanted`.
function lowerBound(column, wanted, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}
