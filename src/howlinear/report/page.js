"use strict";
document.documentElement.classList.add("scripted");

// Tables: a button in each heading sorts; ties keep their order.
const key = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent : cell.dataset.v === "" ? null : Number(cell.dataset.v);
};
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const rows = [...body.rows].sort((a, b) => {
        const u = key(a, column), v = key(b, column);
        if (u === null || v === null) return (u === null) - (v === null);
        const order = typeof u === "number" ? u - v : u.localeCompare(v);
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
}

// The filter: words that a row must contain, and its verdict.
const find = document.getElementById("find"), word = document.getElementById("word");
const filter = () => {
  const wanted = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0, all = 0;
  for (const row of document.querySelectorAll("table.sortable tbody tr")) {
    if (!row.closest(".wide").getClientRects().length) continue;  // of a run that is switched off
    const text = row.textContent.toLowerCase();
    row.hidden = !((!word.value || row.dataset.word === word.value) && wanted.every((w) => text.includes(w)));
    all += 1;
    shown += !row.hidden;
  }
  document.getElementById("count").textContent = `${shown} of ${all} blocks`;
};
if (find) {
  find.addEventListener("input", filter);
  word.addEventListener("change", filter);
  for (const run of document.querySelectorAll("input[id^=on-r]")) run.addEventListener("change", filter);
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
