"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const hidden = new Set();
  const config = { displayModeBar: false, displaylogo: false, showSendToCloud: false };

  function themed(value, style) {
    if (typeof value === "string") return /^@\w+$/.test(value) ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
    if (Array.isArray(value)) return value.map((item) => themed(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, style)]));
    }
    return value;
  }

  function draw(plot) {
    if (!plot.offsetParent) return; // hidden by the policy switch: drawn when it is shown
    const figure = themed(figures[Number(plot.dataset.figure)], getComputedStyle(document.documentElement));
    for (const trace of figure.data) trace.visible = !hidden.has(trace.meta && trace.meta.backend);
    plot.dataset.drawn = "yes";
    figure.layout.width = plot.clientWidth;
    Plotly.react(plot, figure.data, figure.layout, config);
  }

  // Charts are drawn when they come near the window: a report of many workloads opens at once.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !entry.target.dataset.drawn) draw(entry.target);
  }, { rootMargin: "800px" });
  plots.forEach((plot) => watcher.observe(plot));

  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.dataset.drawn && target.offsetParent && target.clientWidth !== target.layout.width) draw(target);
    }
  });
  plots.forEach((plot) => sizes.observe(plot));

  const redraw = () => plots.filter((plot) => plot.dataset.drawn).forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", () => plots.forEach(draw));

  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const name = chip.dataset.backend;
      if (!hidden.delete(name)) hidden.add(name);
      chip.setAttribute("aria-pressed", String(!hidden.has(name)));
      redraw();
    });
  }

  // A run measured under one policy only is shown whichever policy is chosen.
  for (const run of document.querySelectorAll(".run")) {
    const policies = new Set([...run.querySelectorAll("[data-policy]")].map((panel) => panel.dataset.policy));
    if (policies.size === 1) run.classList.add("single-policy");
  }
  const buttons = [...document.querySelectorAll("[data-set-policy]")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.documentElement.dataset.policy = button.dataset.setPolicy;
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    });
  }

  for (const records of document.querySelectorAll(".records")) {
    const body = records.querySelector("tbody");
    records.querySelector("input").addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    const lines = [...records.querySelectorAll("tr")];
    const heads = [...lines[0].cells].map((cell) => cell.textContent);
    const save = (name, kind, text) => {
      const link = document.createElement("a");
      link.href = `data:${kind};charset=utf-8,${encodeURIComponent(text)}`;
      link.download = name;
      link.click();
    };
    const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
    const texts = () => lines.slice(1).map((row) => [...row.cells].map((cell) => cell.textContent));
    const object = (row) => Object.fromEntries(row.map((text, index) => [heads[index], text]));
    records.querySelector("[data-save=csv]").addEventListener("click", () => {
      save("records.csv", "text/csv", [heads, ...texts()].map((row) => row.map(quoted).join(",")).join("\r\n"));
    });
    records.querySelector("[data-save=json]").addEventListener("click", () => {
      save("records.json", "application/json", JSON.stringify(texts().map(object), null, 1));
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    table.querySelectorAll("thead th").forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const key = (row) => {
          const cell = row.cells[column];
          return cell.dataset.sort === undefined ? cell.textContent : Number(cell.dataset.sort);
        };
        // Cells without a figure go last whichever way the column is sorted.
        const compare = (a, b) => {
          if (typeof a !== typeof b) return (typeof a === "number" ? -1 : 1) * (descending ? -1 : 1);
          return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
        };
        const rows = [...body.rows].sort((a, b) => compare(key(a), key(b)));
        body.append(...(descending ? rows.reverse() : rows));
      });
    });
  }
})();
