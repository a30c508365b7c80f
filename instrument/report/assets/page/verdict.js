// The section Verdict: the step, how its time splits, and what to change first.
"use strict";

// The number of findings at the top. The others are folded.
const firstFindings = 3;

sections.verdict = {
  title: "Verdict",
  draw(root, data) {
    const cards = data.findings.map((finding, at) => findingCard(finding, at === 0));
    const parts = [
      factsOf(data),
      whereItGoes(data),
      element("h3", {text: "What to change"}),
      cards.length ? null : element("p", {text: `${data.sentence}.`}),
      data.findings.filter(({saving_ns: saved}) => saved !== null).length > 1
        ? element("p", {class: "soft", text: "Findings may count the same time. So the savings do "
          + "not add up: each is that of one change alone."})
        : null,
      ...cards.slice(0, firstFindings),
      // Without findings, the notes on the simulation are not folded.
      ...(cards.length ? [] : listed(data.notes)),
      folded(`More findings (${cards.length - firstFindings})`, cards.slice(firstFindings)),
      folded(`Passed, or costs too little to matter (${data.passed.length})`, listed(data.passed)),
      folded(`Not checked (${data.not_checked.length})`, listed(data.not_checked)),
      cards.length ? folded("Accuracy of the savings", listed(data.notes)) : null,
      coverage(data),
    ];
    root.append(...parts.filter(Boolean));
  },
};

function factsOf(data) {
  const {spread, steps, parts} = data;
  const hasSteps = steps.numbers.length > 0;
  const found = [fact(
    `${hasSteps ? "A step" : "The recording"} takes`,
    duration(spread.median_ns),
    parts.steps > 1
      ? `median of ${parts.steps} steps, all but the first; between ${duration(spread.min_ns)} and `
        + duration(spread.max_ns)
      : hasSteps ? "one step counts" : "no finished steps",
  )];
  if (data.mfu !== null) {
    const note = data.mfu_is_bound ? "at least: FLOPs are not known for all kernels" : "of the peak";
    found.push(fact("MFU", percent(data.mfu), note));
  }
  if (data.device_share !== null) {
    const whole = hasSteps ? "of the step" : "of the recording";
    found.push(fact("Device busy", percent(data.device_share), whole));
  }
  const [lost, ...others] = data.coverage.filter(row => row.is_incomplete);
  if (lost) {
    const more = others.length ? `, and ${others.length} more` : "";
    found.push(fact(
      "Not all was recorded",
      lost.share === null ? "unknown" : percent(lost.share),
      `${lost.name}${more}: see Coverage of the recording, below`,
    ));
  }
  if (steps.numbers.length > 1) {
    const labels = steps.numbers.map((number, at) => (
      `step ${number}: ${duration(steps.duration_ns[at])}`
    ));
    const label = `Durations of ${labels.length} steps; the first box has the range of durations`;
    const chart = stepChart(steps.duration_ns, labels, label, {width: 200, height: 40});
    found.push(element(
      "div",
      {class: "fact"},
      element("span", {class: "soft", text: "Each step"}),
      chart,
      element("span", {class: "soft", text: `steps ${steps.numbers[0]}–${steps.numbers.at(-1)}`}),
    ));
  }
  return element("div", {class: "facts"}, found);
}

function whereItGoes({parts, steps, device_share: deviceShare}) {
  const what = !steps.numbers.length ? "the recording"
    : parts.steps > 1 ? `${parts.steps} steps` : "the step";
  const kinds = parts.by_kind.map(({name, ns}) => ({
    name: name === "idle" && deviceShare === null ? "idle, or not recorded" : name,
    ns,
    colour: kindColours[name],
  }));
  const ranges = parts.by_range.map(({name, ns}) => ({name, ns, colour: colourOfRange(name)}));
  const shown = [["what happens", kinds]];
  if (ranges.length > 1) shown.push(["range", ranges]);
  const halves = shown.map(([by, found]) => element(
    "div",
    {},
    element("h4", {text: `By ${by}`}),
    stackedBar(found, parts.total_ns, `The time of ${what} by ${by}; the numbers are below`),
    legendOf(found, parts.total_ns),
  ));
  return element(
    "div",
    {},
    element("h3", {text: `Where the time of ${what} goes`}),
    parts.steps > 1 ? element("p", {class: "soft", text: "The times are sums over all steps but "
      + `the first. These ${parts.steps} steps take ${duration(parts.total_ns)} together.`}) : null,
    element("div", {class: "halves"}, halves),
  );
}

function findingCard(finding, isOpen) {
  const saves = finding.saving_ns !== null;
  const summary = element(
    "summary",
    {},
    element("span", {class: "finding-title", text: finding.title}),
    saves ? savingBar(finding) : element("span", {class: "soft saving", text: "saving unknown"}),
  );
  const where = [finding.range && `range ${finding.range}`, finding.source];
  const rows = [
    ["Saves", saves ? savingText(finding) : null],
    ["", finding.difference && element("span", {class: "soft", text: finding.difference})],
    ["Where", where.filter(Boolean).join(", ")],
    ["Change", element("code", {class: "block", text: finding.change})],
    ["Verify", element(
      finding.verify.startsWith("instrument ") ? "code" : "span",
      {class: "block", text: finding.verify},
    )],
  ].filter(([, content]) => content);
  return element(
    "details",
    {class: "finding", id: `finding-${finding.code}`, open: isOpen},
    summary,
    element("dl", {}, rows.map(([term, content]) => [
      element("dt", {text: term}),
      element("dd", {}, content),
    ])),
    finding.evidence.length ? evidence(finding) : null,
  );
}

function savingBar(finding) {
  const share = finding.baseline_ns ? finding.saving_ns / finding.baseline_ns : 0;
  const gauge = element("span", {class: "gauge", "aria-hidden": "true"}, element("span"));
  gauge.firstChild.style.width = `${Math.min(Math.max(share, 0), 1) * 100}%`;
  return element(
    "span",
    {class: "saving"},
    gauge,
    element("span", {text: `saves ${duration(finding.saving_ns)} (${percent(share)})`}),
  );
}

function savingText(finding) {
  const [low, high] = [finding.low_ns, finding.high_ns]
    .sort((one, other) => one - other).map(duration);
  const bounds = low === high ? "" : `, between ${low} and ${high}`;
  const step = finding.phase === null
    ? "step" : `${finding.phase} step of ${duration(finding.baseline_ns)}`;
  return `${duration(finding.saving_ns)} of a ${step}${bounds}`;
}

function evidence(finding) {
  const columns = [
    {title: "evidence", isText: true, cell: (name, row) => evidenceLink(row, name)},
    {title: "calls in total"},
    {title: "time in total", unit: "ns"},
    {title: "detail", isText: true, isSentence: true},
  ];
  const rows = finding.evidence.map(row => (
    [row.name, row.calls, row.total_ns, row.detail, row.start_ns, row.end_ns]
  ));
  return table(columns, rows, {caption: `Evidence: ${finding.title}`});
}

// The name of a row of evidence, as a link to its longest event in the timeline.
function evidenceLink([, , , , start, end], name) {
  if (start === null) return longName(name);
  return element("a", {href: `#timeline?from=${start}&to=${end}`, text: name});
}

function coverage({coverage: rows, cost}) {
  const columns = [
    {title: "what the recording shows", isText: true},
    {title: "share", unit: "share"},
    {title: "what is missing", isText: true, isSentence: true, cell: why => why || ""},
  ];
  return folded("Coverage of the recording", [
    table(columns, rows.map(row => [row.name, row.share, row.why]), {
      caption: "Coverage", filter: false,
    }),
    element("p", {class: "soft", text: cost}),
  ]);
}

function folded(title, content) {
  if (!content.length) return null;
  return element("details", {class: "folded"}, element("summary", {text: title}), content);
}

function listed(sentences) {
  return sentences.length
    ? [element("ul", {}, sentences.map(sentence => element("li", {text: sentence})))]
    : [];
}
