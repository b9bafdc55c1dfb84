"use strict";
(() => {
  const root = document.documentElement, main = document.getElementById("main"), tip = document.getElementById("tip");

  // ---------------------------------------------------------------- light and dark
  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const keep = (theme) => { try { localStorage.setItem("pliant-theme", theme); } catch { /* not allowed for a page from a file */ } };
  const kept = () => { try { return localStorage.getItem("pliant-theme"); } catch { return null; } };
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Show in ${isDark() ? "light" : "dark"} colours`); };
  if (kept() === "dark" || kept() === "light") root.dataset.theme = kept();
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; keep(root.dataset.theme); name(); });
  system.addEventListener("change", name);
  name();

  // ---------------------------------------------------------------- the map: text of a cell, and keyboard navigation
  const cellOf = (event) => (event.target instanceof Element ? event.target.closest(".map td") : null);
  const said = (cell) => {
    const row = cell.parentElement, round = cell.closest("table").tHead.rows[0].cells[cell.cellIndex].textContent;
    const lines = [row.cells[0].textContent, `round ${round}: ${cell.dataset.state}`];
    lines.push(cell.dataset.value === undefined ? "value: not probed" : `value: ${Number(cell.dataset.value).toPrecision(4)}`);
    if (row.dataset.cost) lines.push(`a step with it alone: ${row.dataset.cost.replace(/(\d) (?=\p{L})/gu, "$1\u00a0")}`);
    return lines.join("\n");
  };
  let shown = null;
  const place = () => {
    const box = shown.getBoundingClientRect(), own = tip.getBoundingClientRect(), above = box.top - own.height - 8;
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
    tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
  };
  const show = (cell) => {
    hide();
    shown = cell;
    tip.textContent = said(cell);
    tip.hidden = false;
    cell.setAttribute("aria-describedby", "tip");
    place();
  };
  const hide = () => {
    shown?.removeAttribute("aria-describedby");
    shown = null;
    tip.hidden = true;
  };
  main.addEventListener("pointerover", (event) => { const cell = cellOf(event); if (cell) show(cell); else hide(); });
  main.addEventListener("pointerleave", hide);
  main.addEventListener("focusin", (event) => { const cell = cellOf(event); if (cell) show(cell); else hide(); });
  main.addEventListener("focusout", hide);
  addEventListener("scroll", () => { if (shown) place(); }, { capture: true, passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  main.addEventListener("keydown", (event) => {
    const cell = cellOf(event);
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e9], End: [0, 1e9] }[event.key];
    if (!cell || !move) return;
    event.preventDefault();
    const rows = cell.closest("tbody").rows, row = rows[Math.max(0, Math.min(cell.parentElement.rowIndex - 1 + move[0], rows.length - 1))];
    const next = row.cells[Math.max(1, Math.min(cell.cellIndex + move[1], row.cells.length - 1))];
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
    show(next);
  });
  const enter = () => { for (const map of main.querySelectorAll(".map")) { const first = map.tBodies[0].querySelector("td"); if (first) first.tabIndex = 0; } };
  enter();

  // ---------------------------------------------------------------- updates, while the run trains
  if (!document.body.hasAttribute("data-live")) return;
  const pulse = document.getElementById("pulse");
  let stamp = "";
  const take = (news) => {
    const open = [...main.querySelectorAll("details")].map((each) => each.open), scrolled = [...main.querySelectorAll(".scroll")].map((each) => [each.scrollLeft, each.scrollTop]);
    const cell = document.activeElement?.closest(".map td"), at = cell && [cell.parentElement.rowIndex, cell.cellIndex];
    main.innerHTML = news;  // written by the same server as this page, with everything of the log escaped
    main.querySelectorAll("details").forEach((each, i) => { each.open = open[i] ?? each.open; });
    main.querySelectorAll(".scroll").forEach((each, i) => { if (scrolled[i]) [each.scrollLeft, each.scrollTop] = scrolled[i]; });
    enter();
    hide();
    if (at) main.querySelector(".map")?.rows[at[0]]?.cells[at[1]]?.focus({ preventScroll: true });
  };
  const ask = async () => {
    let wait = 2;
    try {
      const answer = await fetch(`news.json?since=${encodeURIComponent(stamp)}`, { cache: "no-store" });
      const news = await answer.json();
      if (news.main !== undefined) take(news.main);
      stamp = news.stamp ?? stamp;
      wait = news.wait ?? wait;
      pulse.textContent = news.said;
    } catch {
      pulse.textContent = "not connected: the server was stopped";
      wait = 5;
    }
    setTimeout(ask, wait * 1000);
  };
  ask();
})();
