"use strict";
document.documentElement.classList.add("scripted");

// Tables: a button in each heading sorts blocks; ties keep their order.
const key = (body, column) => {
  const cell = body.rows[0].cells[column];
  return cell.dataset.v === undefined ? cell.textContent : cell.dataset.v === "" ? null : Number(cell.dataset.v);
};
const tables = [...document.querySelectorAll("table.sortable")], sort = document.getElementById("sort");
const sortBy = (table, column, down) => {
  const headings = table.querySelectorAll("thead th");
  for (const other of headings) other.removeAttribute("aria-sort");
  headings[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  table.append(...[...table.tBodies].sort((a, b) => {
    const u = key(a, column), v = key(b, column);
    if (u === null || v === null) return (u === null) - (v === null);
    const order = typeof u === "number" ? u - v : u.localeCompare(v);
    return down ? -order : order;
  }));
};
for (const table of tables) {
  table.querySelectorAll("thead th").forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () =>
      sortBy(table, column, heading.getAttribute("aria-sort") === "ascending"));
    if (table === tables[0]) sort.append(new Option(heading.textContent, column));
  });
}
if (sort) sort.addEventListener("change", () => {
  const name = sort.selectedOptions[0].text;
  for (const table of tables) {
    const column = [...table.querySelectorAll("thead th")].findIndex((heading) => heading.textContent === name);
    if (column >= 0) sortBy(table, column, false);
  }
});

// What is behind a verdict: closed at first; the block's number opens and closes it.
const openers = [...document.querySelectorAll(".opener")];
const open = (opener, wanted) => {
  opener.setAttribute("aria-expanded", wanted);
  document.getElementById(opener.getAttribute("aria-controls")).hidden = !wanted;
};
for (const opener of openers) {
  open(opener, false);
  opener.addEventListener("click", () => open(opener, opener.getAttribute("aria-expanded") !== "true"));
}
const all = document.getElementById("open-all");
if (all) all.addEventListener("click", () => {
  const wanted = all.getAttribute("aria-pressed") !== "true";
  all.setAttribute("aria-pressed", wanted);
  all.textContent = wanted ? "Close all" : "Open all";
  for (const opener of openers) open(opener, wanted);
});

// The filter: words that a block must contain, and its verdict.
const find = document.getElementById("find"), word = document.getElementById("word");
const filter = () => {
  const wanted = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0, all = 0;
  for (const body of document.querySelectorAll("table.sortable tbody")) {
    if (!body.closest(".wide").getClientRects().length) continue;  // of a run that is switched off
    const text = body.textContent.toLowerCase();
    body.hidden = !((!word.value || body.dataset.word === word.value) && wanted.every((w) => text.includes(w)));
    all += 1;
    shown += !body.hidden;
  }
  document.getElementById("count").textContent = `${shown} of ${all} blocks`;
};
if (find) {
  find.addEventListener("input", filter);
  word.addEventListener("change", filter);
  for (const run of document.querySelectorAll("input[id^=on-r]")) run.addEventListener("change", filter);
}

// A cell of the strip leads to its block: shown whatever the filter is, opened, with the focus.
const arrive = () => {
  const body = location.hash.startsWith("#block-") && document.getElementById(location.hash.slice(1));
  if (!body) return;
  if (body.hidden) {
    find.value = word.value = "";
    filter();
  }
  const opener = body.querySelector(".opener");
  open(opener, true);
  opener.focus({ preventScroll: true });
  body.scrollIntoView({ block: "center" });
};
addEventListener("hashchange", arrive);
for (const cell of document.querySelectorAll(".strip a")) {
  cell.addEventListener("click", () => { if (cell.hash === location.hash) arrive(); });
}
arrive();

// Buttons that copy a text.
for (const button of document.querySelectorAll(".copy")) {
  const source = document.getElementById(button.dataset.of);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {  // no permission: select it and copy the selection
      getSelection().selectAllChildren(source);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

// The tooltip: shown for the mark nearest to the pointer, or the one that the arrow keys select.
const tip = document.getElementById("tip"), said = document.getElementById("said");
let near = null;
const leave = () => {
  if (near) near.classList.remove("near");
  near = null;
  tip.textContent = "";
};
const point = (mark) => {
  if (mark === near) return;
  leave();
  near = mark;
  mark.classList.add("near");
  tip.textContent = mark.dataset.about;
  const at = mark.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const x = Math.min(at.right + 10, document.documentElement.clientWidth - own.width - 8);
  const y = at.top > own.height + 14 ? at.top - own.height - 8 : at.bottom + 8;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${y}px`;
};
for (const plot of document.querySelectorAll(".plot")) {
  const marks = [];
  for (const title of plot.querySelectorAll("svg > * > title")) {
    const mark = title.parentNode;
    mark.dataset.about = title.textContent;
    title.remove();
    marks.push(mark);
  }
  const seen = () => marks.filter((mark) => mark.getClientRects().length && getComputedStyle(mark).display !== "none");
  plot.addEventListener("pointermove", (event) => {
    let best = event.target.dataset.about === undefined ? null : event.target, least = 12;
    for (const mark of best ? [] : seen()) {
      if (mark.localName === "polyline") continue;
      const box = mark.getBoundingClientRect();
      const away = Math.hypot(event.clientX - (box.left + box.right) / 2, event.clientY - (box.top + box.bottom) / 2);
      if (away < least) [best, least] = [mark, away];
    }
    if (best) point(best);
    else leave();
  });
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Escape") return leave();
    const there = seen();
    if (!(event.key in steps) || !there.length) return;
    event.preventDefault();
    const at = there.indexOf(near);
    const next = at < 0 ? 0 : (at + steps[event.key] + there.length) % there.length;
    point(there[next]);
    said.textContent = tip.textContent;
  });
}

// The numbers of the page as a file.
const save = document.getElementById("save");
if (save) save.addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([document.getElementById("numbers").textContent], { type: "application/json" }));
  link.download = "howlinear.json";
  link.click();
  URL.revokeObjectURL(link.href);
});
