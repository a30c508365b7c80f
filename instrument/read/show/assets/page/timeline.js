// The timeline: tracks of slices on a canvas. The reader can zoom and move it.
"use strict";

const sliceKinds = [
  "range", "operator", "runtime call", "Python function", "device work", "idle", "finding",
];
const [rangeKind, , , , deviceKind, idleKind, findingKind] = sliceKinds.keys();
const rowHeight = 18;
const trackGap = 7;
const mostArrows = 60;

// The slices of the payload as columns, the tracks with their rows, and the links from calls to
// device work.
function unpackSlices(data) {
  const start = summed(data.start);
  const slices = {
    count: start.length,
    start,
    end: start.map((time, at) => time + data.duration[at]),
    tracks: [],
    callOf: new Map(),
    workOf: new Map(),
  };
  let first = 0;
  for (const {name, open, rows} of data.tracks) {
    const made = rows.map(size => {
      first += size;
      return {first: first - size, last: first};
    });
    slices.tracks.push({name, open, rows: made});
  }
  const calls = summed(data.launches);
  summed(data.launched).forEach((work, at) => {
    slices.callOf.set(work, calls[at]);
    if (!slices.workOf.has(calls[at])) slices.workOf.set(calls[at], []);
    slices.workOf.get(calls[at]).push(work);
  });
  return slices;
}

// Set the positions of all rows and return the total height. A closed track shows only one row.
function placeRows(tracks) {
  let top = 0;
  for (const track of tracks) {
    track.top = top;
    track.rows.forEach((row, at) => {
      row.isShown = track.open || at === 0;
      row.top = row.isShown ? top : track.top;
      if (row.isShown) top += rowHeight;
    });
    top += trackGap;
    track.height = top - track.top - trackGap;
  }
  return top;
}

// The colours of the slices: the palette, and for each slice an index into it.
function colourSlices(data, slices) {
  const resolve = colourResolver();
  const idle = ["--launch", "--soft", "--waiting-for-data", "--CPU-operators", "--idle"];
  const known = new Map();
  const palette = [];
  const of = new Uint32Array(slices.count);
  for (let at = 0; at < slices.count; at += 1) {
    const kind = data.kinds[data.name[at]];
    const range = data.range[at];
    const name = data.names[data.name[at]];
    const key = range >= 0 ? `${kind} in ${range}` : `${kind} ${name}`;
    if (!known.has(key)) {
      known.set(key, palette.length);
      const full = range >= 0 ? colourOfRange(data.ranges[range]) : colourOf(name);
      const isFull = kind === rangeKind || kind === deviceKind;
      palette.push({
        fill: resolve(kind === findingKind ? "oklch(0.75 0.15 35)"
          : kind === idleKind ? `color-mix(in oklab, var(${idle[data.causes.indexOf(name)]}) 40%, var(--paper))`
            : isFull ? full : `color-mix(in oklab, ${full} 55%, white)`),
        ink: kind === idleKind ? themeColour("--ink") : "#16191d",
      });
    }
    of[at] = known.get(key);
  }
  return {of, palette};
}

// For each slice, the number of earlier slices whose name contains the query.
function countMatches(data, slices, query) {
  const wanted = query.toLowerCase();
  const matches = data.names.map(name => name.toLowerCase().includes(wanted));
  const before = new Uint32Array(slices.count + 1);
  for (let at = 0; at < slices.count; at += 1) {
    before[at + 1] = before[at] + (matches[data.name[at]] ? 1 : 0);
  }
  return before;
}

sections.timeline = {
  title: "Timeline",
  draw(root, data) {
    const slices = unpackSlices(data);
    const axis = {first: 0, last: Math.max(data.end_ns, 1), begin: 0, end: 0};
    const earliest = slices.start.reduce((least, time) => Math.min(least, time), 0);
    axis.first = earliest - (axis.last - earliest) * 0.005;
    axis.last += (axis.last - earliest) * 0.005;
    let colours = colourSlices(data, slices);
    let height = placeRows(slices.tracks);
    let selected = -1;
    let matched = null;

    const canvas = element("canvas", {
      tabindex: "0",
      role: "application",
      "aria-label": "Timeline. Arrow keys move, plus and minus zoom, Shift with an arrow key "
        + "selects the next slice, whose details are below.",
    });
    const ruler = element("canvas", {"aria-hidden": "true"});
    const names = element("div", {class: "names"});
    const scroller = element("div", {class: "scroller"}, names, canvas);
    const details = element("div", {class: "details", role: "status"});
    const frame = element(
      "div", {class: "timeline"}, element("div", {class: "ruler"}, ruler), scroller,
    );
    const rowOfSlice = at => {
      for (const track of slices.tracks) {
        for (const row of track.rows) if (at < row.last) return {row, track};
      }
      return null;
    };
    const rangeOf = at => (data.range[at] < 0 ? null : data.ranges[data.range[at]]);
    const nameOf = at => data.names[data.name[at]];

    const paint = () => {
      const width = scroller.clientWidth - names.offsetWidth;
      const view = {
        top: scroller.scrollTop, width, height: scroller.clientHeight,
        scale: width / (axis.end - axis.begin), ink: themeColour("--ink"),
        soft: themeColour("--soft"), line: themeColour("--line"),
      };
      if (width <= 0) return;
      const marks = ticks(axis, width);
      paintRuler(fitted(ruler, width, 30), view, marks);
      const context = fitted(canvas, width, view.height);
      context.fillStyle = view.line;
      for (const [time] of marks) context.fillRect(x(time, view), 0, 0.5, view.height);
      let rectangles = 0;
      for (const track of slices.tracks) {
        const edge = track.top + track.height + 3 - view.top;
        context.fillStyle = view.line;
        context.fillRect(0, edge, width, 0.5);
        for (const row of track.rows) {
          const top = row.top - view.top;
          if (row.isShown && top > -rowHeight && top < view.height) {
            rectangles += paintRow(context, view, row, top);
          }
        }
      }
      canvas.dataset.rectangles = rectangles;
      const middle = (axis.begin + axis.end) / 2;
      const step = data.steps.findIndex(
        ([, start, length]) => start <= middle && middle < start + length,
      );
      const isWhole = axis.begin === axis.first && axis.end === axis.last;
      stepChoice.value = isWhole || step < 0 ? "all" : step;
      paintSteps(context, view);
      if (selected >= 0) paintSelection(context, view);
    };
    const repaint = painter(paint, scroller);

    const x = (time, view) => (time - axis.begin) * view.scale;

    const paintRuler = (context, view, marks) => {
      context.fillStyle = view.soft;
      for (const [time, text] of marks) {
        context.fillRect(x(time, view), 22, 1, 8);
        if (x(time, view) < view.width - 60) context.fillText(text, x(time, view) + 3, 23);
      }
      data.steps.forEach(([number, start, length]) => {
        const [left, right] = [x(start, view), x(start + length, view)];
        if (right < 0 || left > view.width) return;
        context.fillStyle = view.line;
        context.fillRect(left + 1, 1, Math.max(right - left - 2, 1), 13);
        context.fillStyle = view.ink;
        const from = Math.max(left, 0);
        fillLabel(context, `step ${number}`, from, 8, Math.min(right, view.width) - from);
      });
    };

    // Slices that are narrower than a pixel and begin in the same pixel share one rectangle. A
    // finding always has its own rectangle, which is wide enough to see.
    const paintRow = (context, view, row, top) => {
      const {start, end} = slices;
      const isFinding = data.kinds[data.name[row.first]] === findingKind;
      let rectangles = 0;
      let at = lowerBound(end, axis.begin, row.first, row.last);
      let colour = "";
      while (at < row.last && start[at] < axis.end) {
        const left = Math.max(x(start[at], view), -2);
        const right = Math.min(x(end[at], view), view.width + 2);
        let next = at + 1;
        if (right - left < 1 && !isFinding) {
          const until = axis.begin + (Math.floor(left) + 1) / view.scale;
          next = lowerBound(start, until, next, row.last);
          if (next > at + 1 && end[next - 1] > until) next -= 1; // it reaches the next pixel
        }
        const isDim = matched && matched[next] === matched[at];
        const own = colours.palette[colours.of[at]];
        const wanted = isDim ? view.line : own.fill;
        if (wanted !== colour) context.fillStyle = wanted;
        colour = wanted;
        const width = Math.max(right - left - (right - left > 3 ? 0.6 : 0), isFinding ? 4 : 1);
        context.fillRect(left, top + 1, width, rowHeight - 2);
        rectangles += 1;
        if (width > 22) {
          colour = isDim ? view.soft : own.ink;
          context.fillStyle = colour;
          fillLabel(context, printable(nameOf(at)), Math.max(left, 0), top + rowHeight / 2 + 0.5,
            Math.min(right, view.width) - Math.max(left, 0));
        }
        at = next;
      }
      return rectangles;
    };

    const paintSteps = (context, view) => {
      context.strokeStyle = view.soft;
      context.setLineDash([2, 3]);
      context.beginPath();
      for (const [, start, length] of data.steps) {
        for (const time of [start, start + length]) {
          context.moveTo(x(time, view), 0);
          context.lineTo(x(time, view), view.height);
        }
      }
      context.stroke();
      context.setLineDash([]);
    };

    const paintSelection = (context, view) => {
      const {row} = rowOfSlice(selected);
      context.lineWidth = 2;
      context.strokeStyle = view.ink;
      const left = Math.max(x(slices.start[selected], view), -4);
      const right = Math.min(x(slices.end[selected], view), view.width + 4);
      context.strokeRect(left, row.top - view.top + 1, Math.max(right - left, 2), rowHeight - 2);
      const call = slices.callOf.get(selected);
      const pairs = call === undefined
        ? (slices.workOf.get(selected) || []).map(work => [selected, work])
        : [[call, selected]];
      context.lineWidth = 1.3;
      for (const [from, to] of pairs.slice(0, mostArrows)) paintArrow(context, view, from, to);
    };

    const paintArrow = (context, view, call, work) => {
      const [from, to] = [x(slices.end[call], view), x(slices.start[work], view)];
      const [top, bottom] = [call, work].map(at => rowOfSlice(at).row.top - view.top + 9);
      context.beginPath();
      context.moveTo(from, top);
      context.lineTo(to, bottom);
      context.arc(to, bottom, 3, 0, 7);
      context.stroke();
    };

    // The slice at most two pixels from the pointer; -1 if there is none.
    const sliceAt = event => {
      const box = canvas.getBoundingClientRect();
      const y = event.clientY - box.top + scroller.scrollTop;
      const perPixel = (axis.end - axis.begin) / box.width;
      const time = axis.begin + (event.clientX - box.left) * perPixel;
      for (const track of slices.tracks) {
        for (const row of track.rows) {
          if (!row.isShown || y < row.top || y >= row.top + rowHeight) continue;
          const at = lowerBound(slices.end, time - 2 * perPixel, row.first, row.last);
          return at < row.last && slices.start[at] <= time + 2 * perPixel ? at : -1;
        }
      }
      return -1;
    };

    const select = at => {
      selected = at;
      details.replaceChildren(...(at < 0 ? [hint()] : detailsOf(at)));
      repaint();
    };

    // Select a slice, and move the view until the slice is visible.
    const goTo = at => {
      const {row, track} = rowOfSlice(at);
      if (!row.isShown) toggle(track);
      const length = slices.end[at] - slices.start[at];
      if (slices.end[at] < axis.begin || slices.start[at] > axis.end
          || length * 50 < axis.end - axis.begin || length > axis.end - axis.begin) {
        showSpan(axis, slices.start[at] - 2 * length, slices.end[at] + 2 * length);
      }
      const isAbove = row.top < scroller.scrollTop;
      if (isAbove || row.top + rowHeight > scroller.scrollTop + scroller.clientHeight) {
        scroller.scrollTop = row.top - scroller.clientHeight / 2;
      }
      select(at);
    };

    const hint = () => element("p", {
      class: "soft",
      text: "Click a slice for its details. Drag to move. Hold Ctrl and turn the wheel to zoom. "
        + "Keys: arrows, or A and D, move; + and −, or W and S, zoom; 0 shows the step; Shift and "
        + "an arrow select the next slice.",
    });

    const link = at => element(
      "button", {type: "button", class: "link", onclick: () => goTo(at), text: nameOf(at)},
    );

    const detailsOf = at => {
      const kind = data.kinds[data.name[at]];
      const length = slices.end[at] - slices.start[at];
      const work = slices.workOf.get(at) || [];
      const call = slices.callOf.get(at);
      const facts = [
        ["kind", sliceKinds[kind]],
        ["range", rangeOf(at)],
        ["track", rowOfSlice(at).track.name],
        ["start", `${duration(slices.start[at])} after the first event`],
        ["duration", duration(length)],
        ["self", kind < deviceKind ? duration(length - data.inner[at]) : null],
        ["launched by", call === undefined ? null : link(call)],
        ["started", call === undefined ? null
          : `${duration(slices.start[at] - slices.start[call])} after the call began`],
        ["launches", work.length ? link(work[0]) : null],
        ["", work.length > 1 ? `and ${work.length - 1} more` : null],
      ];
      return [
        element("h3", {text: nameOf(at)}),
        element("dl", {}, facts.filter(([, value]) => value !== null).map(([name, value]) => (
          element("div", {}, element("dt", {text: name}), element("dd", {}, value))
        ))),
      ];
    };

    // The next slice in the direction of an arrow key: in the same row, or in the next row.
    const neighbour = key => {
      if (selected < 0) {
        const {first, last} = slices.tracks[0].rows[0];
        return Math.min(lowerBound(slices.end, axis.begin, first, last), last - 1);
      }
      const {row, track} = rowOfSlice(selected);
      if (key === "ArrowLeft") return Math.max(selected - 1, row.first);
      if (key === "ArrowRight") return Math.min(selected + 1, row.last - 1);
      const rows = slices.tracks.flatMap(each => (each.open ? each.rows : each.rows.slice(0, 1)));
      const own = rows.indexOf(row.isShown ? row : track.rows[0]);
      const other = rows[own + (key === "ArrowUp" ? -1 : 1)];
      if (!other) return selected;
      const time = slices.start[selected] + 1;
      return Math.min(lowerBound(slices.end, time, other.first, other.last), other.last - 1);
    };

    const toggle = track => {
      track.open = !track.open;
      height = placeRows(slices.tracks);
      placeNames();
      repaint();
    };

    const placeNames = () => {
      names.style.height = `${height}px`;
      names.replaceChildren(...slices.tracks.map(track => {
        const canFold = track.rows.length > 1;
        const label = element("button", {
          type: "button",
          title: track.name,
          disabled: !canFold,
          "aria-expanded": canFold ? String(track.open) : null,
          onclick: () => toggle(track),
          text: `${canFold ? (track.open ? "▾ " : "▸ ") : ""}${track.name}`,
        });
        label.style.top = `${track.top}px`;
        return label;
      }));
      scroller.style.height = `${Math.min(height, 620)}px`;
    };

    const showStep = at => {
      const [, start, length] = data.steps[at];
      showSpan(axis, start - length * 0.02, start + length * 1.02);
      repaint();
    };
    const showAll = () => {
      showSpan(axis, axis.first, axis.last);
      repaint();
    };
    const showFirst = () => (data.first_step === null ? showAll() : showStep(data.first_step));

    const stepChoice = element("select", {
      "aria-label": "Step",
      onchange: ({target}) => (target.value === "all" ? showAll() : showStep(Number(target.value))),
    }, element("option", {value: "all", text: "whole trace"}), data.steps.map(([number], at) => (
      element("option", {value: at, text: `step ${number}`})
    )));
    const found = element("span", {class: "soft", role: "status"});
    const search = element("input", {
      type: "search",
      placeholder: "Search slices",
      "aria-label": "Search slices by name; Enter selects the next",
      oninput: event => {
        matched = event.target.value ? countMatches(data, slices, event.target.value) : null;
        found.textContent = matched ? `${matched[slices.count].toLocaleString("en")} found` : "";
        repaint();
      },
      onkeydown: event => {
        if (event.key !== "Enter" || !matched || !matched[slices.count]) return;
        const rank = (selected < 0 ? 0 : matched[selected + 1]) % matched[slices.count];
        goTo(lowerBound(matched, rank + 1, 0, matched.length) - 1);
      },
    });
    const button = (text, title, act) => element("button", {
      type: "button", title, "aria-label": title, text, onclick: () => { act(); repaint(); },
    });
    const zoomBy = factor => zoomSpan(axis, factor, (axis.begin + axis.end) / 2);

    root.append(...[
      data.steps.length > 1 ? element("p", {class: "soft", text: shownFirst()}) : null,
      data.left_out ? element("p", {class: "soft", text: leftOut()}) : null,
      element("div", {class: "tools"}, stepChoice,
        button("+", "Zoom in", () => zoomBy(1 / 1.5)), button("−", "Zoom out", () => zoomBy(1.5)),
        search, found),
      frame,
      details,
    ].filter(each => each));

    function shownFirst() {
      const step = `The timeline opens at step ${data.steps[data.first_step][0]}, `;
      return data.first_code === null ? `${step}the median of all steps but the first.`
        : `${step}because the evidence of the finding ${data.first_code} is there.`;
    }

    function leftOut() {
      const [missing, whole] = [data.left_out, data.left_out + slices.count].map(
        each => each.toLocaleString("en"),
      );
      const kept = data.first_step === null
        ? "" : `, first of all those outside of step ${data.steps[data.first_step][0]}`;
      return `${missing} of ${whole} slices are left out: the shortest ones${kept}.`;
    }

    moveByPointer(canvas, axis, repaint, {scroller, clicked: event => select(sliceAt(event))});
    tooltip(frame, canvas, event => {
      const at = event.buttons ? -1 : sliceAt(event);
      return at < 0 ? [] : [
        nameOf(at), duration(slices.end[at] - slices.start[at]), rangeOf(at) || "",
      ].filter(text => text);
    });
    canvas.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.shiftKey && event.key.startsWith("Arrow")) goTo(neighbour(event.key));
      else if (event.key === "0") showFirst();
      else if (event.key === "Escape") select(-1);
      else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        scroller.scrollTop += event.key === "ArrowUp" ? -rowHeight * 2 : rowHeight * 2;
      } else if (!moveByKey(axis, event.key)) return;
      event.preventDefault();
      repaint();
    });

    // If the page's address gives the time of an event, show this time and select the slice.
    const showEvidence = () => {
      const values = addressed("timeline");
      if (!values || !values.has("from")) return;
      const [from, to] = [Number(values.get("from")), Number(values.get("to"))];
      if (!Number.isFinite(from) || !(to > from)) return;
      const margin = Math.max(to - from, 1000) / 2;
      showSpan(axis, from - margin, to + margin);
      // The slice of the event, or else of the finding, whose track comes first.
      const at = slices.start.findLastIndex((start, slice) => (
        start === from && slices.end[slice] === to && data.kinds[data.name[slice]] !== idleKind
      ));
      if (at >= 0) goTo(at);
      repaint();
    };

    placeNames();
    select(-1);
    showFirst();
    showEvidence();
    addEventListener("hashchange", showEvidence);
    scroller.addEventListener("scroll", repaint);
    light.addEventListener("change", () => { colours = colourSlices(data, slices); });
  },
};
