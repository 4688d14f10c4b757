"use strict";
// Marks are {inspector, items: {id: {observe, evidence, think, answer, done, remark}}}.

const byId = (id) => document.getElementById(id);
const items = [...document.querySelectorAll(".item")];
const inspector = byId("inspector");
const key = `inspection-${document.body.dataset.key}`;
const fields = (item) => [...item.querySelectorAll("input[type=checkbox], textarea")];

const read = () => {
  const marks = { sheet: document.body.dataset.key, inspector: inspector.value, items: {} };
  items.forEach((item) => {
    marks.items[item.dataset.id] = Object.fromEntries(
      fields(item).map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]));
  });
  return marks;
};

const show = () => {
  const done = items.filter((item) => item.querySelector("[name=done]").checked);
  items.forEach((item) => item.classList.toggle("done", done.includes(item)));
  byId("progress").textContent = `${done.length} of ${items.length} looked at`;
  byId("next").disabled = done.length === items.length;
};

const write = (marks) => {
  inspector.value = typeof marks.inspector === "string" ? marks.inspector : "";
  items.forEach((item) => {
    const found = (marks.items || {})[item.dataset.id] || {};
    fields(item).forEach((field) => {
      if (field.type === "checkbox") field.checked = found[field.name] === true;
      else field.value = typeof found[field.name] === "string" ? found[field.name] : "";
    });
  });
  show();
};

const keep = () => {
  try { localStorage.setItem(key, JSON.stringify(read())); } catch { /* a browser that keeps nothing */ }
  show();
};

try { write(JSON.parse(localStorage.getItem(key)) || {}); } catch { show(); }
document.addEventListener("input", (event) => { if (event.target.type !== "file") keep(); });

byId("save").addEventListener("click", () => {
  const file = new Blob([JSON.stringify(read(), null, 1)], { type: "application/json" });
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(file), download: `${key}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});

byId("load").addEventListener("change", async (event) => {
  const file = event.target.files[0];
  event.target.value = "";
  if (!file) return;
  try {
    const marks = JSON.parse(await file.text());
    if (marks.sheet !== document.body.dataset.key) throw new Error("these marks belong to another sheet");
    write(marks);
    keep();
  } catch (error) {
    byId("progress").textContent = `not loaded: ${error.message}`;
  }
});

byId("next").addEventListener("click", () => {
  const open = items.find((item) => !item.querySelector("[name=done]").checked);
  if (open) open.scrollIntoView();
});

// Pages: enlarged in a dialog.
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
