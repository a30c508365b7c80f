// The verdict: the step, where it goes, and what to change first.
"use strict";

sections.verdict = {
  title: "Verdict",
  draw(root, data) {
    if (data.step_ns !== null) {
      root.append(element("p", {text: `A step takes ${duration(data.step_ns)}.`}));
    }
  },
};
