// What is drawn on canvases: the ranks of a role, the timeline, and charts.
"use strict";

const STATES = ["waiting", "starting", "alive", "running", "serving", "unready", "done", "stopped", "failed"];

page.stateOf = (role, rank) => (page.hasFailed(role.name, rank) ? "failed" : role.ranks[rank][0]);

page.counts = (role) => {
  const found = {};
  for (let rank = 0; rank < role.ranks.length; rank++) {
    const state = page.stateOf(role, rank);
    found[state] = (found[state] ?? 0) + 1;
  }
  return STATES.filter((state) => found[state]).map((state) => [state, found[state]]);
};

const prepared = (canvas, width, height) => {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  return paint;
};

const tip = page.h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
document.body.append(tip);

const showTip = (event, text) => {
  tip.hidden = text === "";
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 300)}px`;
  tip.style.top = `${event.clientY + 14}px`;
};

// The ranks of one role as cells. A canvas, as there may be ten thousand; keys move a cursor over them.
page.grid = (role, choose) => {
  const canvas = page.h("canvas", { class: "grid", tabindex: "0", role: "application", "aria-roledescription": "grid of ranks" });
  let colours = {}, paint = null, columns = 1, size = 20, at = 0, focused = false;

  const words = (rank) => {
    const row = role.ranks[rank];
    const node = row[1] >= 0 ? ` on ${page.job.nodes[row[1]]}` : "";
    const more = row[7] || row[9];
    return `${role.name}:${rank} ${page.stateOf(role, rank)}${node}${row[2] ? `, incarnation ${row[2]}` : ""}${more ? `, ${more}` : ""}`;
  };

  const label = () => {
    const counts = page.counts(role).map(([state, count]) => `${count} ${state}`).join(", ");
    canvas.setAttribute("aria-label", `${role.name}: ${counts}. Arrow keys move over the ranks, Enter shows one.`);
  };

  const cell = (rank) => {
    const gap = size > 8 ? 2 : 1;
    const x = (rank % columns) * (size + gap), y = Math.floor(rank / columns) * (size + gap);
    const state = page.stateOf(role, rank);
    paint.clearRect(x, y, size + gap, size + gap);
    paint.fillStyle = colours[state] ?? colours.waiting;
    paint.fillRect(x, y, size, size);
    paint.fillStyle = paint.strokeStyle = colours.on;
    const middle = size / 2;
    if (size >= 9 && state === "failed") {
      // A form beside the colour, for those who do not tell it.
      paint.lineWidth = 1.5;
      paint.beginPath();
      paint.moveTo(x + size * 0.28, y + size * 0.28);
      paint.lineTo(x + size * 0.72, y + size * 0.72);
      paint.moveTo(x + size * 0.72, y + size * 0.28);
      paint.lineTo(x + size * 0.28, y + size * 0.72);
      paint.stroke();
    } else if (size >= 9 && (state === "stopped" || state === "done")) paint.fillRect(x + size * 0.28, y + middle - 1, size * 0.44, 2);
    else if (size >= 9 && (state === "starting" || state === "waiting" || state === "alive")) paint.fillRect(x + middle - 1.5, y + middle - 1.5, 3, 3);
    else if (size >= 9 && state === "unready") paint.fillRect(x + middle - 1, y + size * 0.2, 2, size * 0.6);
    if (focused && rank === at) {
      paint.strokeStyle = colours.focus;
      paint.lineWidth = 2;
      paint.strokeRect(x + 1, y + 1, size - 2, size - 2);
    }
  };

  const draw = () => {
    const count = role.ranks.length, width = canvas.parentElement?.clientWidth ?? 800;
    colours = Object.fromEntries([...STATES, "on", "focus"].map((name) => [name, page.colour(name)]));
    size = count <= 64 ? 24 : count <= 512 ? 15 : count <= 4096 ? 9 : 6;
    const step = size + (size > 8 ? 2 : 1);
    columns = Math.max(1, Math.floor(width / step));
    paint = prepared(canvas, width, Math.max(step, Math.ceil(count / columns) * step));
    for (let rank = 0; rank < count; rank++) cell(rank);
    label();
  };

  const update = (ranks) => {
    if (paint === null) return;
    for (const rank of ranks) if (rank < role.ranks.length) cell(rank);
    label();
  };

  const rankAt = (event) => {
    const box = canvas.getBoundingClientRect(), step = size + (size > 8 ? 2 : 1);
    const column = Math.floor((event.clientX - box.left) / step), line = Math.floor((event.clientY - box.top) / step);
    const rank = line * columns + column;
    return column >= 0 && column < columns && rank >= 0 && rank < role.ranks.length ? rank : -1;
  };

  const move = (to) => {
    const before = at;
    at = Math.max(0, Math.min(role.ranks.length - 1, to));
    update([before, at]);
    page.announce(words(at));
  };

  canvas.addEventListener("mousemove", (event) => showTip(event, rankAt(event) < 0 ? "" : words(rankAt(event))));
  canvas.addEventListener("mouseleave", (event) => showTip(event, ""));
  canvas.addEventListener("click", (event) => { if (rankAt(event) >= 0) { at = rankAt(event); choose(role.name, at); } });
  canvas.addEventListener("focus", () => { focused = true; update([at]); page.announce(words(at)); });
  canvas.addEventListener("blur", () => { focused = false; update([at]); });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -Infinity, End: Infinity };
    if (event.key in steps) move(at + steps[event.key]);
    else if (event.key === "Enter" || event.key === " ") choose(role.name, at);
    else return;
    event.preventDefault();
  });
  return { canvas, draw, update };
};

// A range of x that several pictures share, with buttons for it.
page.zoom = (changed) => {
  let range = null;
  const set = (next) => { range = next; changed(); };
  const scaled = (whole, factor) => {
    const [from, to] = range ?? whole, middle = (from + to) / 2, half = ((to - from) / 2) * factor;
    const next = [Math.max(whole[0], middle - half), Math.min(whole[1], middle + half)];
    set(next[1] - next[0] >= (whole[1] - whole[0]) * 0.999 ? null : next);
  };
  const shifted = (whole, part) => {
    if (range === null) return;
    const width = range[1] - range[0];
    const from = Math.max(whole[0], Math.min(whole[1] - width, range[0] + part * width));
    set([from, from + width]);
  };
  return {
    get range() { return range; },
    set,
    buttons: (whole) => [
      page.h("button", { type: "button", onclick: () => scaled(whole(), 0.5), "aria-label": "Zoom in" }, "+"),
      page.h("button", { type: "button", onclick: () => scaled(whole(), 2), "aria-label": "Zoom out" }, "−"),
      page.h("button", { type: "button", onclick: () => shifted(whole(), -0.5), "aria-label": "Earlier" }, "←"),
      page.h("button", { type: "button", onclick: () => shifted(whole(), 0.5), "aria-label": "Later" }, "→"),
      page.h("button", { type: "button", onclick: () => set(null) }, "All"),
    ],
    scaled,
    shifted,
  };
};

// One chart: lines over one x, each with the range of its ranks behind it.
page.chart = (name, lines, axis, zoom, height = 200) => {
  const figure = page.h("figure", { class: "card chart" });
  const summary = lines.map((line) => {
    const values = line.points.mean, last = values.length ? page.figure(values.at(-1)) : "none";
    const nan = line.points.more ? `, ${line.points.more} values not finite` : "";
    return `${line.label}: last ${last}, least ${page.figure(Math.min(...line.points.low))}, greatest ${page.figure(Math.max(...line.points.high))}${nan}`;
  });
  const box = page.h("div", { role: "img", "aria-label": `${name} over ${axis}. ${summary.join(". ")}` });
  const nan = lines.reduce((sum, line) => sum + line.points.more, 0);
  figure.append(page.h("h2", {}, name, nan ? page.h("span", { class: "small" }, ` · ${nan} not finite`) : ""), box);
  let plot = null;

  const draw = () => {
    const [text, line] = [page.colour("text"), page.colour("line")];
    const tables = [], series = [{ label: axis === "step" ? "step" : "seconds" }], bands = [];
    lines.forEach((each, n) => {
      const colour = page.colour(`c${n % 8}`), points = each.points;
      const spread = points.low.some((low, k) => low !== points.high[k]);
      const single = points.x.length === 1;
      series.push({ label: each.label, stroke: colour, width: 1.5, spanGaps: true, points: { show: single, size: 6 }, dash: n >= 8 ? [6, 3] : undefined, value: (_, v) => (v === null || v === undefined ? "–" : page.figure(v)) });
      tables.push([points.x, points.mean]);
      if (spread) {
        const hidden = { show: true, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...hidden, label: "greatest", class: "spread" }, { ...hidden, label: "least", class: "spread" });
        tables.push([points.x, points.high], [points.x, points.low]);
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${colour}33` });
      }
    });
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const font = '11px system-ui, "DejaVu Sans", sans-serif';
    const look = { stroke: text, font, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    box.replaceChildren();
    plot = new uPlot(
      {
        width: Math.max(200, figure.clientWidth - 34),
        height,
        scales: { x: { time: false, range: (_, low, high) => zoom.range ?? [low, high > low ? high : low + 1] } },
        axes: [{ ...look, values: axis === "step" ? undefined : (_, marks) => marks.map((v) => page.duration(v).replace(" 0 s", "")) }, { ...look, size: 62, values: (_, marks) => marks.map((v) => page.figure(v)) }],
        series,
        bands,
        cursor: { sync: { key: "charts" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
        legend: { live: true },
        hooks: {
          setSelect: [(u) => {
            if (u.select.width < 4) return;
            zoom.set([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          }],
        },
      },
      data,
      box,
    );
    for (const each of box.querySelectorAll(".u-legend .u-series")) {
      if (["greatest", "least"].includes(each.querySelector(".u-label").textContent)) each.hidden = true;
    }
    plot.over.addEventListener("dblclick", () => zoom.set(null));
  };
  return { figure, draw, destroy: () => plot?.destroy() };
};

// The spans of all ranks. Only the lanes that are visible are drawn.
page.lanes = (data, zoom) => {
  const lanes = data.roles.flatMap((role) => role.ranks.map((spans, rank) => ({ name: `${role.name}:${rank}`, spans })));
  const tall = lanes.length > 2000 ? 6 : lanes.length > 100 ? 12 : 20, head = 34, left = 110;
  const canvas = page.h("canvas", { role: "img", "aria-label": `Timeline of ${lanes.length} ranks over ${page.duration(data.end)}, with ${data.marks.length} marked events, which are listed below.` });
  const scroll = page.h("div", { class: "lanes", tabindex: "0", role: "region", "aria-label": "Timeline" }, canvas, page.h("div"));
  const whole = () => [0, Math.max(data.end, 0.001)];
  let across = (x) => x, back = (x) => x;

  const draw = () => {
    const height = Math.min(lanes.length * tall + head, Math.round(innerHeight * 0.6) - 2), width = scroll.clientWidth;
    scroll.lastChild.style.height = `${Math.max(0, lanes.length * tall + head - height)}px`;
    const paint = prepared(canvas, width, height);
    canvas.style.width = `${width}px`;
    const colours = Object.fromEntries([...STATES, "text", "quiet", "line", "card", "link"].map((name) => [name, page.colour(name)]));
    const [from, to] = zoom.range ?? whole();
    across = (at) => left + ((at - from) / (to - from)) * (width - left - 8);
    back = (x) => from + ((x - left) / (width - left - 8)) * (to - from);
    paint.fillStyle = colours.card;
    paint.fillRect(0, 0, width, height);
    paint.font = '11px system-ui, "DejaVu Sans", sans-serif';
    paint.textBaseline = "middle";
    const top = scroll.scrollTop, first = Math.floor(top / tall), last = Math.min(lanes.length, Math.ceil((top + height) / tall));
    for (let n = first; n < last; n++) {
      const y = head + n * tall - top;
      if (y < head - tall) continue;
      for (const [start, end, state] of lanes[n].spans) {
        if (end < from || start > to) continue;
        const x = Math.max(across(start), left), right = Math.min(across(end), width - 8);
        paint.fillStyle = colours[state] ?? colours.waiting;
        paint.fillRect(x, y + 1, Math.max(right - x, 1.5), tall - 2);
      }
      if (tall >= 12 || n % 2 === 0) {
        paint.fillStyle = colours.text;
        paint.fillText(lanes[n].name.slice(0, 16), 6, y + tall / 2, left - 10);
      }
    }
    paint.fillStyle = colours.card;
    paint.fillRect(0, 0, width, head);
    paint.fillStyle = colours.quiet;
    paint.strokeStyle = colours.line;
    for (let n = 0; n <= 6; n++) {
      const at = from + ((to - from) * n) / 6, x = across(at);
      paint.textAlign = n === 6 ? "right" : "center";
      paint.fillText(page.duration(at), x, 9);
      paint.beginPath();
      paint.moveTo(x, 18);
      paint.lineTo(x, height);
      paint.globalAlpha = 0.5;
      paint.stroke();
      paint.globalAlpha = 1;
    }
    paint.textAlign = "left";
    // Failures last, as each has a decision at the same moment.
    for (const mark of [...data.marks].sort((a, b) => (a.kind === "failure") - (b.kind === "failure"))) {
      if (mark.at < from || mark.at > to) continue;
      paint.fillStyle = mark.kind === "failure" ? colours.failed : colours.link;
      const x = across(mark.at);
      paint.beginPath();
      paint.moveTo(x, 31);
      paint.lineTo(x - 5, 22);
      paint.lineTo(x + 5, 22);
      paint.fill();
    }
  };

  scroll.addEventListener("scroll", draw);
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect(), at = back(event.clientX - box.left), y = event.clientY - box.top;
    const near = data.marks.filter((mark) => Math.abs(across(mark.at) - (event.clientX - box.left)) < 6);
    if (y < head) showTip(event, near.map((mark) => `${mark.kind}: ${mark.text}`).slice(0, 3).join("\n"));
    else {
      const lane = lanes[Math.floor((y - head + scroll.scrollTop) / tall)];
      const span = lane?.spans.find(([start, end]) => start <= at && at <= end);
      showTip(event, span ? `${lane.name} ${span[2]} from ${page.duration(span[0])} to ${page.duration(span[1])}` : "");
    }
  });
  canvas.addEventListener("mouseleave", (event) => showTip(event, ""));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom.scaled(whole(), event.deltaY > 0 ? 1.25 : 0.8);
  }, { passive: false });
  scroll.addEventListener("keydown", (event) => {
    if (event.key === "+") zoom.scaled(whole(), 0.5);
    else if (event.key === "-") zoom.scaled(whole(), 2);
    else if (event.key === "ArrowLeft") zoom.shifted(whole(), -0.25);
    else if (event.key === "ArrowRight") zoom.shifted(whole(), 0.25);
    else return;
    event.preventDefault();
  });
  return { element: scroll, draw, whole };
};

addEventListener("resize", () => page.resized?.());
