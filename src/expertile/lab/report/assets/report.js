"use strict";
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const { columns, rows, figures } = await new Response(stream).json();
  const every = (selector, within = document) => [...within.querySelectorAll(selector)];
  const plots = every(".plot");
  const hidden = new Set();
  // Outlines around the origin; what is not closed ("Z") is drawn with strokes.
  const markers = {
    circle: "M-3.9 0a3.9 3.9 0 1 0 7.8 0a3.9 3.9 0 1 0 -7.8 0Z",
    square: "M3.3 -3.3L3.3 3.3L-3.3 3.3L-3.3 -3.3Z",
    diamond: "M0.0 -4.6L4.6 0.0L0.0 4.6L-4.6 0.0Z",
    "triangle-up": "M0.0 -4.6L4.0 2.3L-4.0 2.3Z",
    "triangle-down": "M0.0 4.6L-4.0 -2.3L4.0 -2.3Z",
    pentagon: "M0.0 -4.6L4.4 -1.4L2.7 3.7L-2.7 3.7L-4.4 -1.4Z",
    hexagon: "M0.0 -4.6L4.0 -2.3L4.0 2.3L0.0 4.6L-4.0 2.3L-4.0 -2.3Z",
    star: "M0.0 -4.6L1.2 -1.7L4.4 -1.4L2.0 0.6L2.7 3.7L0.0 2.1L-2.7 3.7L-2.0 0.6L-4.4 -1.4L-1.2 -1.7Z",
    "star-square": "M0.0 -4.6L1.5 -1.5L4.6 0.0L1.5 1.5L0.0 4.6L-1.5 1.5L-4.6 0.0L-1.5 -1.5Z",
    "star-hexagon": "M0.0 -4.6L1.1 -2.0L4.0 -2.3L2.3 0.0L4.0 2.3L1.1 2.0L0.0 4.6L-1.1 2.0L-4.0 2.3L-2.3 0.0L-4.0 -2.3L-1.2 -2.0Z",
    octagon: "M0.0 -4.6L3.3 -3.3L4.6 0.0L3.3 3.3L0.0 4.6L-3.3 3.3L-4.6 0.0L-3.3 -3.3Z",
    "star-triangle-up": "M0.0 -4.6L1.6 -0.9L4.0 2.3L0.0 1.8L-4.0 2.3L-1.6 -0.9Z",
    bowtie: "M-4.6 -3.7L4.6 3.7L4.6 -3.7L-4.6 3.7Z",
    hourglass: "M-3.7 -4.6L3.7 -4.6L-3.7 4.6L3.7 4.6Z",
    cross: "M-4.6 -0.0L4.6 0.0M-0.0 -4.6L0.0 4.6",
    x: "M-3.4 -3.4L3.4 3.4M3.4 -3.4L-3.4 3.4",
  };
  const CHAR = 7; // width of a character of a chart's text, in pixels

  function add(parent, tag, attributes = {}, text = "") {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return parent.appendChild(node);
  }

  // "@fg" is a colour of the page, "#0072B2" one of a backend, which the page lightens in the dark.
  const ink = (colour, use = "c") => `var(--${colour[0] === "@" ? colour.slice(1) : use + colour.slice(1)})`;

  function marker(parent, symbol, colour, x, y) {
    const d = symbol === "stroke" ? "M-5 0H5" : markers[symbol] || markers.circle;
    const closed = d.endsWith("Z");
    const style = closed ? `fill:${ink(colour)};stroke:var(--bg)` : `fill:none;stroke:${ink(colour)};stroke-width:2`;
    add(parent, "path", { d, style, transform: `translate(${x} ${y})` });
  }

  function scale({ log, range }, from, to) {
    const at = log ? Math.log : Number;
    const [first, last] = range.map(at);
    return (value) => Math.round(10 * (from + ((to - from) * (at(value) - first)) / (last - first))) / 10;
  }

  function path(xs, ys) {
    return xs.map((x, i) => (x === null ? "" : `${i && xs[i - 1] !== null ? "L" : "M"}${x} ${ys[i]}`)).join("");
  }

  function drawAxes(svg, { x, y }, toX, toY, box) {
    let end = -Infinity;
    for (const [value, text] of x.ticks || []) {
      const at = toX(value), half = (text.length * CHAR) / 2;
      add(svg, "path", { class: "grid", d: `M${at} ${box.top}V${box.bottom}` });
      if (at - half < end + 4) continue;
      end = at + half;
      add(svg, "text", { x: Math.min(Math.max(at, half), box.right + 14 - half), y: x.top ? box.top - 6 : box.bottom + 16, "text-anchor": "middle" }, text);
    }
    for (const [value, text] of y.ticks || []) {
      add(svg, "path", { class: "grid", d: `M${box.left} ${toY(value)}H${box.right}` });
      if (text) add(svg, "text", { x: box.left - 6, y: toY(value) + 4, "text-anchor": "end" }, text);
    }
    const middle = (box.left + box.right) / 2, height = (box.top + box.bottom) / 2;
    add(svg, "text", { x: middle, y: x.top ? 13 : box.bottom + 34, "text-anchor": "middle" }, x.title || "");
    if (y.title) add(svg, "text", { "text-anchor": "middle", transform: `translate(12 ${height}) rotate(-90)` }, y.title);
  }

  function drawMark(svg, mark, toX, toY, box, points) {
    const group = add(svg, "g", { "data-backend": mark.backend });
    const xs = mark.x.map((x) => x === null ? null : toX(x)), ys = mark.y.map((y) => y === null ? null : toY(y));
    if (mark.kind === "line" || mark.kind === "curve") {
      const style = `stroke:${ink(mark.colour)}`;
      add(group, "path", { class: "line", d: path(xs, ys), style, "stroke-dasharray": mark.dash === "dot" ? "2 3" : "" });
    }
    if (mark.kind === "line") return;
    xs.forEach((x, i) => {
      const y = ys[i], tip = (mark.rows || mark.notes)[i];
      points.push({ x, y, tip, backend: mark.backend, bar: mark.kind === "bar" });
      if (mark.kind === "bar") {
        const fill = `fill:${ink(mark.colour)}`;
        add(group, "rect", { x: box.left, y: y - 8, width: Math.max(1, x - box.left), height: 16, style: fill });
      }
      let end = x;
      if (mark.low && mark.high[i] > mark.low[i]) {
        const low = toX(mark.low[i]), high = (end = toX(mark.high[i]));
        const d = `M${low} ${y}H${high}M${low} ${y - 3}v6M${high} ${y - 3}v6`;
        add(group, "path", { class: "whisker", d, style: `stroke:${mark.kind === "bar" ? "var(--fg)" : ink(mark.colour)}` });
      }
      if (mark.kind !== "bar") return marker(group, mark.symbol, mark.colour, x, y);
      const inside = x - box.left > mark.text[i].length * CHAR + 12;
      const style = inside ? `fill:${ink(mark.colour, "t")};stroke:${ink(mark.colour)}` : "";
      const place = { class: "halo", x: inside ? box.left + 6 : end + 6, y: y + 4, style };
      add(group, "text", place, mark.text[i]);
    });
  }

  function draw(plot) {
    const width = plot.clientWidth;
    if (!width) return; // hidden by the policy switch: drawn when it is shown
    const figure = figures[Number(plot.dataset.figure)], { x, y, height } = figure;
    const widest = Math.max(0, ...(y.ticks || []).map(([, text]) => text.length));
    const box = { left: y.title ? 30 + widest * CHAR : 2, right: width - 14, top: x.top ? 40 : 14 };
    box.bottom = height - (x.top ? 8 : 44);
    const toX = scale(x, box.left, box.right), toY = scale(y, box.bottom, box.top);
    const svg = add(document.createElement("div"), "svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    plot.points = [];
    plot.dataset.drawn = width;
    drawAxes(svg, figure, toX, toY, box);
    for (const mark of figure.marks) drawMark(svg, mark, toX, toY, box, plot.points);
    for (const label of figure.labels) {
      const free = label.x === undefined;
      const place = { x: free ? box.left : toX(label.x), y: toY(label.y) + (free ? 4 : -5) };
      const text = add(svg, "text", { ...place, class: free ? "halo heading" : "accent", "text-anchor": label.anchor || "start" });
      text.textContent = label.text;
      if (label.full) add(text, "title", {}, label.full);
    }
    plot.replaceChildren(svg);
    showChosen(plot);
  }

  const showChosen = (within) => every("g[data-backend]", within).forEach((group) => {
    group.style.display = hidden.has(group.dataset.backend) ? "none" : "";
  });

  // Charts are drawn when they come near the window: a report of many workloads opens at once.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !entry.target.dataset.drawn) draw(entry.target);
  }, { rootMargin: "800px" });
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.dataset.drawn && Number(target.dataset.drawn) !== target.clientWidth) draw(target);
  });
  for (const plot of plots) {
    if (plot.getBoundingClientRect().top < innerHeight) draw(plot);
    watcher.observe(plot);
    sizes.observe(plot);
  }
  matchMedia("print").addEventListener("change", () => plots.forEach(draw));

  // One tooltip for charts and tables: a record's figures, or a note.
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  const cells = (row) => Object.fromEntries(columns.map(([name], index) => [name, row[index]]));
  function told(row) {
    const r = cells(row);
    const standing = /^\d/.test(r.Standing) ? `${r.Standing} the best time` : r.Standing;
    if (r["µs"] === "–") return [`${r.Backend}, ${r.Policy}: ${r.Status}`, r.Workload, r.Reason].join("\n");
    const share = r["Of bound"] === "–" ? "bound unknown" : `${r["Of bound"]} of the bound (${r["Limited by"]})`;
    const config = r.Config === "–" ? [] : [r.Config];
    return [`${r.Backend}, ${r.Policy}`, r.Workload, `${r["µs"]} µs ${r["95 %"]} · ${r.Rate}`, share, standing, ...config].join("\n");
  }
  function show(event, found) {
    tip.hidden = found === undefined;
    if (tip.hidden) return;
    tip.textContent = typeof found === "number" ? told(rows[found]) : found;
    const room = { x: innerWidth - tip.offsetWidth - 8, y: innerHeight - tip.offsetHeight - 8 };
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, room.x))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, room.y))}px`;
  }
  tip.hidden = true;
  function nearest(plot, event) {
    const frame = plot.getBoundingClientRect();
    const away = (p) => {
      const dx = p.x - event.clientX + frame.left, dy = p.y - event.clientY + frame.top;
      return p.bar ? (Math.abs(dy) < 9 ? 0 : Infinity) : Math.hypot(dx, dy);
    };
    const shown = (plot.points || []).filter((point) => !hidden.has(point.backend));
    const best = shown.reduce((a, b) => (a && away(a) <= away(b) ? a : b), null);
    return best && away(best) < 14 ? best.tip : undefined;
  }
  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest(".plot"), cell = event.target.closest("[data-row]");
    show(event, plot ? nearest(plot, event) : cell ? Number(cell.dataset.row) : undefined);
  });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  for (const chip of every(".chip")) {
    const look = chip.querySelector("svg");
    if (look) marker(look, look.dataset.symbol, look.dataset.colour, 0, 0);
    chip.addEventListener("click", () => {
      const name = chip.dataset.backend;
      if (!hidden.delete(name)) hidden.add(name);
      chip.setAttribute("aria-pressed", String(!hidden.has(name)));
      showChosen(document);
    });
  }

  // A run measured under one policy only is shown whichever policy is chosen.
  for (const run of every(".run")) {
    const policies = new Set(every("[data-policy]", run).map((panel) => panel.dataset.policy));
    if (policies.size === 1) run.classList.add("single-policy");
  }
  function choose(policy) {
    document.documentElement.dataset.policy = policy;
    for (const button of every("[data-set-policy]")) {
      button.setAttribute("aria-pressed", String(button.dataset.setPolicy === policy));
    }
  }
  for (const button of every("[data-set-policy]")) button.addEventListener("click", () => choose(button.dataset.setPolicy));
  // A link to a workload shows it, whichever policy it was measured under.
  function follow() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const panel = target && target.closest("[data-policy]:not(html)");
    if (panel && !panel.offsetParent) choose(panel.dataset.policy);
    if (target) target.scrollIntoView({ block: "center" });
  }
  addEventListener("hashchange", follow);
  if (location.hash) follow();

  function save(name, kind, text) {
    const link = document.createElement("a");
    link.href = `data:${kind};charset=utf-8,${encodeURIComponent(text)}`;
    link.download = name;
    link.click();
  }
  function build(records, own) {
    const table = records.querySelector("table");
    const head = table.createTHead().insertRow();
    for (const [name, kind] of columns) {
      const th = head.appendChild(document.createElement("th"));
      th.className = kind;
      th.appendChild(document.createElement("button")).textContent = name;
    }
    const body = table.createTBody();
    for (const row of own) {
      const line = body.insertRow();
      line.className = row.at(-1) ? "baseline" : "rival";
      columns.forEach(([name, kind], index) => {
        const cell = line.appendChild(document.createElement(index ? "td" : "th"));
        cell.className = kind;
        if (name === "Status") cell.appendChild(document.createElement("span")).className = `status ${row[index]}`;
        (cell.firstChild || cell).textContent = row[index];
      });
    }
    makeSortable(table);
    records.querySelector("input").addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
  for (const records of every(".records")) {
    const first = Number(records.dataset.first);
    const own = rows.slice(first, first + Number(records.dataset.count));
    records.addEventListener("toggle", () => build(records, own), { once: true });
    const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
    records.querySelector("[data-save=csv]").addEventListener("click", () => {
      const texts = own.map((row) => columns.map((_, index) => quoted(row[index])));
      save("records.csv", "text/csv", [columns.map(([name]) => quoted(name)), ...texts].map((row) => row.join(",")).join("\r\n"));
    });
    records.querySelector("[data-save=json]").addEventListener("click", () => {
      save("records.json", "application/json", JSON.stringify(own.map(cells), null, 1));
    });
  }

  const UNITS = { G: 1e9, T: 1e12 };
  function figure(text) {
    if (/^(fastest|tie|inconclusive)/.test(text)) return 1;
    const found = /^±?([\d,.]+(?:e[-+]\d+)?) ?([GT])?/.exec(text);
    return found ? Number(found[1].replaceAll(",", "")) * (UNITS[found[2]] || 1) : NaN;
  }
  function makeSortable(table) {
    every("thead th", table).forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        every("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const text = (row) => row.cells[column].textContent, sign = descending ? -1 : 1;
        const compare = (a, b) => {
          if (!head.classList.contains("num")) return sign * text(a).localeCompare(text(b), undefined, { numeric: true });
          const x = figure(text(a)), y = figure(text(b));
          // Cells without a figure go last whichever way the column is sorted.
          return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y);
        };
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
      });
    });
  }
  every(".glance, .scores").forEach(makeSortable);
})();
