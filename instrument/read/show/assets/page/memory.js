// The memory of each device: a stacked chart over time, the memory at the peak, and each step.
"use strict";

// The colours of Okabe and Ito, which most colour-blind readers can distinguish, and one more.
const seriesColours = [
  "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1",
];
const chartHeight = 280;
const axisWidth = 84;

// The series of a chart as areas, each on top of the one before.
function stackedSeries(chart) {
  const time = summed(chart.time);
  let below = new Float64Array(time.length);
  let coloured = 0;
  const areas = chart.series.map(({name, is_grey: isGrey, bytes: changes}) => {
    const own = summed(changes);
    const area = {
      name, own, below, top: own.map((value, at) => value + below[at]),
      colour: isGrey ? (name.includes("before") ? "#9aa0a6" : "#c9cdd2")
        : seriesColours[coloured++ % seriesColours.length],
    };
    below = area.top;
    return area;
  });
  return {time, areas, whole: below, reserved: chart.reserved && summed(chart.reserved)};
}

function memoryChart({device, steps}, stacked) {
  const {time, areas, whole, reserved} = stacked;
  const last = Math.max(time[time.length - 1], time[0] + 1);
  const axis = {first: time[0], last, begin: time[0], end: last};
  const peak = whole.reduce((most, value, at) => (value > whole[most] ? at : most), 0);
  const most = Math.max(whole[peak], reserved ? reserved.reduce((a, b) => Math.max(a, b)) : 0, 1);
  const canvas = element("canvas", {
    tabindex: "0",
    role: "application",
    "aria-label": `Memory of ${device} over time. Left and right arrows move, plus and minus `
      + "zoom, 0 shows all. The tables below hold the same numbers.",
  });
  const frame = element("div", {class: "chart"}, canvas);
  let pointed = null;

  const at = wanted => Math.max(lowerBound(time, wanted + 1, 0, time.length) - 1, 0);
  const paint = () => {
    const width = frame.clientWidth - axisWidth;
    if (width <= 0) return;
    const context = fitted(canvas, width, chartHeight + 20);
    const scale = width / (axis.end - axis.begin);
    const x = value => (value - axis.begin) * scale;
    const y = value => 16 + (chartHeight - 16) * (1 - value / most);
    const [soft, line, ink] = ["--soft", "--line", "--ink"].map(themeColour);
    const from = at(axis.begin);
    const to = Math.min(lowerBound(time, axis.end, 0, time.length), time.length - 1);
    const stairs = (values, isBack) => {
      for (let k = 0; k <= to - from; k += 1) {
        const point = isBack ? to - k : from + k;
        const next = Math.min(point + 1, time.length - 1);
        const ends = [[time[point], values[point]], [time[next], values[point]]];
        for (const [moment, value] of isBack ? ends.reverse() : ends) {
          context.lineTo(x(moment), y(value));
        }
      }
    };
    for (const area of areas) {
      context.fillStyle = area.colour;
      context.globalAlpha = 0.85;
      context.beginPath();
      stairs(area.top, false);
      stairs(area.below, true);
      context.fill();
    }
    context.globalAlpha = 1;
    context.fillStyle = line;
    for (let part = 0; part <= 4; part += 1) context.fillRect(0, y((most * part) / 4), width, 0.5);
    context.fillStyle = soft;
    for (const [moment, text] of ticks(axis, width)) {
      context.fillRect(x(moment), chartHeight, 1, 5);
      if (x(moment) < width - 60) context.fillText(text, x(moment) + 3, chartHeight + 11);
    }
    context.strokeStyle = ink;
    if (reserved) {
      context.setLineDash([6, 3]);
      context.beginPath();
      stairs(reserved, false);
      context.stroke();
    }
    context.setLineDash([2, 4]);
    context.strokeStyle = soft;
    context.fillStyle = ink;
    for (const [number, start] of steps) {
      context.beginPath();
      context.moveTo(x(start), 4);
      context.lineTo(x(start), chartHeight);
      context.stroke();
      context.fillText(`step ${number}`, x(start) + 3, 8);
    }
    context.setLineDash([]);
    context.strokeStyle = ink;
    context.beginPath();
    context.arc(x(time[peak]), y(whole[peak]), 4, 0, 7);
    context.stroke();
    if (pointed !== null) context.fillRect(x(pointed), 0, 1, chartHeight);
  };
  const repaint = painter(paint, frame);

  moveByPointer(canvas, axis, repaint);
  tooltip(frame, canvas, event => {
    pointed = timeAt(canvas, axis, event);
    repaint();
    const point = at(pointed);
    return [
      `${bytes(whole[point])} after ${duration(Math.round(pointed))}`,
      ...(reserved ? [`${bytes(reserved[point])} reserved by the allocator`] : []),
      ...areas.filter(area => area.own[point]).reverse().map(
        area => `${bytes(area.own[point])} ${area.name}`,
      ),
    ];
  });
  canvas.addEventListener("pointerleave", () => {
    pointed = null;
    repaint();
  });
  canvas.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "0") showSpan(axis, axis.first, axis.last);
    else if (!moveByKey(axis, event.key)) return;
    event.preventDefault();
    repaint();
  });

  const labels = [4, 3, 2, 1, 0].map(part => {
    const label = element("span", {text: bytes(Math.round((most * part) / 4))});
    label.style.top = `${16 + (chartHeight - 16) * (1 - part / 4)}px`;
    return label;
  });
  frame.append(element("div", {class: "levels", "aria-hidden": "true"}, labels));
  return frame;
}

function memoryLegend(stacked) {
  const entries = stacked.areas.slice().reverse().map(area => (
    element("span", {}, mark(area.colour), longName(area.name))
  ));
  if (stacked.reserved) {
    const dashes = element("i", {class: "dashes"});
    entries.unshift(element("span", {}, dashes, "reserved by the allocator"));
  }
  return element("p", {class: "legend"}, entries);
}

drawings.memory = chart => {
  const stacked = stackedSeries(chart);
  return [memoryChart(chart, stacked), memoryLegend(stacked)];
};
