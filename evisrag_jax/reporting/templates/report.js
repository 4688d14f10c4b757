"use strict";
// Comforts only: without this script every chart, group and prediction can still be read.

const byId = (id) => document.getElementById(id);

// Light and dark: the browser's choice until the reader makes another.
(() => {
  const button = byId("theme");
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  let dark = null;
  const isDark = () => (dark === null ? wanted.matches : dark);
  const show = () => {
    button.setAttribute("aria-pressed", isDark());
    document.documentElement.style.colorScheme = dark === null ? "" : dark ? "dark" : "light";
  };
  button.addEventListener("click", () => { dark = !isDark(); show(); });
  wanted.addEventListener("change", show);
  button.hidden = false;
  show();
})();

// Charts: values under the pointer, or by the arrow keys.
document.querySelectorAll(".chart").forEach((figure) => {
  const svg = figure.querySelector("svg");
  const { at, values } = JSON.parse(figure.dataset.readout);
  if (!at.length) return;
  const step = figure.querySelector("[data-at]");
  const outputs = [...figure.querySelectorAll("[data-value]")];
  const cross = figure.querySelector(".cross");
  const names = outputs.map((b) => b.previousSibling.textContent.trim());
  const final = outputs.map((b) => b.textContent);
  const last = at.length - 1;
  let place = last;
  const show = (i, mark) => {
    place = i;
    step.textContent = at[i][0];
    outputs.forEach((b, line) => { b.textContent = mark ? values[line][i] ?? "–" : final[line]; });
    cross.setAttribute("x1", at[i][1]);
    cross.setAttribute("x2", at[i][1]);
    cross.setAttribute("visibility", mark ? "visible" : "hidden");
    svg.setAttribute("aria-valuenow", at[i][0]);
    svg.setAttribute("aria-valuetext", `step ${at[i][0]}: ` + outputs.map((b, n) => `${names[n]} ${b.textContent}`).join(", "));
  };
  svg.setAttribute("role", "slider");
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("aria-valuemin", at[0][0]);
  svg.setAttribute("aria-valuemax", at[last][0]);
  show(last, false);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 360;
    let nearest = 0;
    at.forEach((point, i) => { if (Math.abs(point[1] - x) < Math.abs(at[nearest][1] - x)) nearest = i; });
    show(nearest, true);
  });
  svg.addEventListener("pointerleave", () => show(last, false));
  svg.addEventListener("blur", () => show(last, false));
  svg.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: place - 1, ArrowDown: place - 1, ArrowRight: place + 1, ArrowUp: place + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(Math.min(last, Math.max(0, to)), true);
  });
});

// Rollouts: one group at a time, chosen by step and question.
(() => {
  const toolbar = byId("rollout-toolbar");
  const groups = [...document.querySelectorAll(".group")];
  if (!toolbar || !groups.length) return;
  const steps = [...new Set(groups.map((g) => g.dataset.step))];
  const stepBox = byId("rollout-step"), questionBox = byId("rollout-question");
  const option = (value, label) => Object.assign(document.createElement("option"), { value, textContent: label });
  let current = groups[0];
  const show = (group) => {
    current = group;
    stepBox.value = group.dataset.step;
    const here = groups.filter((g) => g.dataset.step === group.dataset.step);
    questionBox.replaceChildren(...here.map((g) => option(g.id, g.dataset.question || g.dataset.record || g.id)));
    questionBox.value = group.id;
    groups.forEach((g) => { g.hidden = g !== group; });
    group.open = true;
    byId("rollout-previous").disabled = group === groups[0];
    byId("rollout-next").disabled = group === groups[groups.length - 1];
  };
  stepBox.append(...steps.map((s) => option(s, s)));
  stepBox.addEventListener("change", () => {
    const there = groups.filter((g) => g.dataset.step === stepBox.value);
    show(there.find((g) => g.dataset.record === current.dataset.record) || there[0]);
  });
  questionBox.addEventListener("change", () => show(byId(questionBox.value)));
  byId("rollout-previous").addEventListener("click", () => show(groups[groups.indexOf(current) - 1]));
  byId("rollout-next").addEventListener("click", () => show(groups[groups.indexOf(current) + 1]));
  const reveal = (id) => {
    const target = id && byId(id);
    const group = target && target.closest(".group");
    if (!group) return;
    show(group);
    target.open = true;
    target.scrollIntoView();
    target.querySelector("summary").focus({ preventScroll: true });
  };
  document.querySelectorAll(".matrix a").forEach((link) => link.addEventListener("click", (event) => {
    event.preventDefault();
    history.replaceState(null, "", link.hash);
    reveal(link.hash.slice(1));
  }));
  toolbar.hidden = false;
  show(current);
  reveal(location.hash.slice(1));
})();

// Pages: enlarged in a dialog.
(() => {
  const dialog = byId("zoom"), body = byId("zoom-body");
  document.querySelectorAll(".sheet[data-name]").forEach((sheet) => {
    const svg = sheet.querySelector("svg");
    sheet.setAttribute("role", "button");
    sheet.setAttribute("tabindex", "0");
    sheet.setAttribute("aria-label", `Enlarge ${svg.getAttribute("aria-label")}`);
    const open = () => {
      body.replaceChildren(svg.cloneNode(true));
      byId("zoom-name").textContent = svg.getAttribute("aria-label");
      dialog.showModal();
    };
    sheet.addEventListener("click", open);
    sheet.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); }
    });
  });
  byId("zoom-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
})();
