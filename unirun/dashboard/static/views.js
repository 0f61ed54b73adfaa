// The views. Each gives its content, and what to do when something happens (`update`), when it is drawn, when it is left.
"use strict";

const { h } = page;

const select = (label, options, chosen, changed) =>
  h("label", {}, label, h("select", { onchange: (event) => changed(event.target.value) }, options.map(([value, text]) => h("option", { value, selected: value === chosen }, text))));

const phaseOf = (job) => (job.code === null || job.code === undefined ? job.phase : `${job.phase}, exit code ${job.code}`);

// The jobs of this user.

page.views.jobs = async () => {
  let { jobs } = await page.get("/api/jobs");
  let words = "";
  const body = h("div");
  const draw = () => {
    const fits = jobs.filter((job) => `${job.run_id} ${job.name} ${job.phase}`.toLowerCase().includes(words));
    const rows = fits.slice(0, 500).map((job) => [
      h("a", { href: page.href(["job", job.run_id]) }, job.run_id),
      page.badge(job.phase, phaseOf(job)),
      Object.entries(job.roles).map(([role, count]) => `${role} ${count}`).join(", "),
      page.clock(job.started),
      page.since(job.started, job.phase === "lost" ? job.started : job.ended),
    ]);
    body.replaceChildren(
      fits.length ? page.table(["Job", "State", "Roles and ranks", "Started", { number: "Took" }], rows, "Jobs") : h("p", { class: "quiet" }, jobs.length ? "No job fits." : "There are no jobs yet."),
      fits.length > 500 ? h("p", { class: "quiet" }, `${fits.length - 500} more: filter them.`) : "",
    );
  };
  draw();
  const filter = h("input", { type: "search", placeholder: "id, name or state", "aria-label": "Filter the jobs", oninput: (event) => { words = event.target.value.toLowerCase(); draw(); } });
  return {
    content: [h("div", { class: "row" }, h("h1", {}, "Jobs"), h("span", { class: "grow" }), filter), h("div", { class: "card" }, body)],
    update: (news) => { jobs = news.jobs; draw(); },
  };
};

page.views.experiments = async () => {
  const { trials } = await page.get("/api/trials");
  const rows = trials.map((each) => [each.experiment, each.trial, page.badge(each.phase), h("a", { href: page.href(["job", each.job, "metrics"]) }, each.job)]);
  return {
    content: [
      h("h1", {}, "Experiments and their trials"),
      h("div", { class: "card" }, rows.length ? page.table(["Experiment", "Trial", "State", "Job and its metrics"], rows, "Trials") : h("p", { class: "quiet" }, "No trial of an experiment was started yet.")),
    ],
  };
};

// One job.

const alerts = (job) => [
  job.trouble && h("p", { class: "alert bad" }, `Store: ${job.trouble}`),
  job.sick.map((text) => h("p", { class: "alert bad" }, `Sick: ${text}`)),
  job.waiting.map((text) => h("p", { class: "alert" }, `Waiting: ${text}`)),
  job.stragglers.map((text) => h("p", { class: "alert" }, `Slow: ${text}`)),
  job.lost.length ? h("p", { class: "alert bad" }, `Lost nodes: ${job.lost.join(", ")}`) : "",
  job.tainted.length ? h("p", { class: "alert" }, `Nodes that get no more ranks: ${job.tainted.join(", ")}`) : "",
];

const head = (job) =>
  h(
    "div",
    { class: "card" },
    h("div", { class: "row" }, h("h1", {}, job.run_id), page.badge(job.phase, phaseOf(job)), h("span", { class: "quiet" }, page.since(job.started, job.ended), `, started ${page.clock(job.started)}`)),
    job.reason ? h("p", {}, page.withLinks(job.reason)) : "",
    h(
      "div",
      { class: "row small quiet" },
      h("span", {}, `${job.nodes.length} ${job.nodes.length === 1 ? "node" : "nodes"}`),
      h("a", { href: page.href(["job", job.run_id, "failures"]) }, `${job.failed} ${job.failed === 1 ? "failure" : "failures"}`),
      job.max_job_restarts ? h("span", {}, `the job has restarted ${job.restarts} of ${job.max_job_restarts} times`) : "",
      job.committed >= 0 ? h("span", {}, `step ${job.committed} is committed`) : "",
      job.epoch > 1 ? h("span", {}, `master of term ${job.epoch}`) : "",
    ),
  );

const legend = (role) => page.counts(role).map(([state, count]) => page.badge(state, `${count} ${state}`));

const DECIDING = ["failure", "decision", "restart", "move", "taint", "sick", "agent_lost", "arrival", "drain", "stopping", "end", "master", "inject", "start", "store", "late", "straggler"];

const eventTable = (events, began, label) =>
  page.table(
    [{ number: "Seconds" }, "Kind", "What"],
    events.map((event) => [(event.time - began).toFixed(3), event.kind, page.withLinks(event.text)]),
    label,
  );

page.views.overview = async ({ query }) => {
  const top = h("div"), roles = h("div"), latest = h("div"), aside = h("div");
  let grids = new Map(), legends = new Map(), heads = new Map();
  let chosen = null;

  const drawTop = () => top.replaceChildren(head(page.job), ...alerts(page.job).flat(2).filter(Boolean));

  const roleHead = (role) => [
    h("h2", {}, role.name),
    page.badge(role.phase),
    h("span", { class: "quiet small" }, `generation ${role.generation}, restarts ${role.used}${role.program ? `, ${role.program}` : ""}`),
  ];

  const drawRoles = () => {
    [grids, legends, heads] = [new Map(), new Map(), new Map()];
    roles.replaceChildren(
      ...page.job.roles.map((role) => {
        const grid = page.grid(role, (name, rank) => { location.hash = page.href(["job", page.job.run_id, "overview"], { rank: `${name}:${rank}` }); });
        const counts = h("div", { class: "legend" }, legend(role)), heading = h("div", { class: "row" }, roleHead(role));
        grids.set(role.name, grid);
        legends.set(role.name, counts);
        heads.set(role.name, heading);
        return h("section", { class: "card", "aria-label": `Role ${role.name}`, "data-role": role.name }, heading, h("div", {}, grid.canvas), counts);
      }),
    );
    for (const grid of grids.values()) grid.draw();
  };

  const drawLatest = () => {
    const events = page.job.events.filter((event) => DECIDING.includes(event.kind)).slice(-15).reverse();
    latest.replaceChildren(h("section", { class: "card" }, h("h2", {}, "Latest decisions"), eventTable(events, page.job.started, "Latest decisions")));
  };

  const drawRank = async (who) => {
    chosen = who;
    if (!who) {
      aside.replaceChildren();
      return;
    }
    const at = who.lastIndexOf(":"), role = who.slice(0, at), rank = who.slice(at + 1);
    try {
      const found = await page.get(`/api/jobs/${page.job.run_id}/rank`, { role, rank });
      if (chosen !== who) return;
      const facts = [
        ["state", page.badge(found.state)], ["why", found.why], ["node", found.node], ["slots", found.slots.join(", ")], ["process", found.pid], ["address", found.address],
        ["incarnation", found.incarnation], ["generation", found.generation], ["memory", page.size(found.memory)], ["processor", found.cpu === null ? "" : `${found.cpu.toFixed(1)} s`], ["ended", found.exit],
        ...Object.entries(found.metrics).filter(([name]) => !name.includes("/from/")).slice(0, 40).map(([name, value]) => [name, page.figure(value)]),
      ].filter(([, value]) => value !== "" && value !== null && value !== undefined);
      aside.replaceChildren(
        h(
          "section",
          { class: "card", "aria-label": `Rank ${who}` },
          h("div", { class: "row" }, h("h2", {}, who), h("span", { class: "grow" }), h("a", { href: page.href(["job", page.job.run_id, "logs"], { rank: who }) }, "Logs"), h("a", { href: page.href(["job", page.job.run_id, "overview"]) }, "Close")),
          h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
          h("h3", {}, "Its latest events"),
          eventTable(found.events.slice(-12).reverse(), page.job.started, `Events of ${who}`),
        ),
      );
    } catch (error) {
      aside.replaceChildren(h("section", { class: "card" }, h("h2", {}, who), h("p", {}, error.message)));
    }
  };
  const again = page.throttled(1, () => drawRank(chosen));

  drawTop();
  drawLatest();
  return {
    content: [top, h("div", { class: "columns" }, roles, h("div", {}, aside, latest))],
    drawn: () => {
      drawRoles();
      drawRank(query.get("rank"));
      page.resized = () => { for (const grid of grids.values()) grid.draw(); };
    },
    placed: (now) => drawRank(now.get("rank")),
    update: (news) => {
      drawTop();
      if (news.events.length) drawLatest();
      if (news.all) {
        drawRoles();
        return;
      }
      for (const role of page.job.roles) {
        if (!news.rows?.has(role.name) && !(news.change?.roles ?? {})[role.name]) continue;
        grids.get(role.name).update(news.rows?.get(role.name) ?? []);
        legends.get(role.name).replaceChildren(...legend(role));
        heads.get(role.name).replaceChildren(...roleHead(role));
      }
      if (chosen && news.rows?.get(chosen.split(":")[0])?.includes(Number(chosen.split(":")[1]))) again();
    },
    left: () => { page.resized = null; },
  };
};

page.views.graph = async () => {
  const picture = h("div", { class: "picture" }), calls = h("div");
  let before = null, rates = new Map();
  const key = (call) => `${call.source}\n${call.target}\n${call.method}`;

  const drawPicture = async () => {
    const { svg } = await page.get(`/api/jobs/${page.job.run_id}/graph`);
    const parsed = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
    parsed.setAttribute("role", "img");
    parsed.setAttribute("aria-label", "The roles and the calls between them, which are listed below.");
    picture.replaceChildren(document.importNode(parsed, true));
  };

  const drawCalls = () => {
    const now = page.now();
    if (before !== null && now - before.at >= 1) {
      for (const call of page.job.calls) {
        const was = before.calls.get(key(call));
        if (was) rates.set(key(call), [(call.calls - was.calls) / (now - before.at), (call.bytes + call.returned - was.bytes - was.returned) / (now - before.at)]);
      }
    }
    if (before === null || now - before.at >= 1) before = { at: now, calls: new Map(page.job.calls.map((call) => [key(call), { ...call }])) };
    const rows = page.job.calls.map((call) => {
      const [perSecond, bytes] = rates.get(key(call)) ?? [null, null];
      return [
        call.source, call.target, call.method, call.calls.toLocaleString("en"), perSecond === null ? "" : perSecond.toFixed(1), bytes === null ? "" : `${page.size(bytes)}/s`,
        call.calls ? page.duration(call.seconds / call.calls) : "", page.size(call.bytes), page.size(call.returned),
      ];
    });
    const headers = ["Caller", "Called", "Method", { number: "Calls" }, { number: "Per second" }, { number: "Traffic" }, { number: "Mean time" }, { number: "Sent" }, { number: "Returned" }];
    calls.replaceChildren(rows.length ? page.table(headers, rows, "Calls between roles") : h("p", { class: "quiet" }, "This job has made no calls that unirun has seen."));
  };

  await drawPicture();
  drawCalls();
  const again = page.throttled(2, drawPicture);
  return {
    content: [h("h1", {}, "Graph"), h("div", { class: "card" }, picture), h("section", { class: "card" }, h("h2", {}, "Traffic on its edges"), calls)],
    update: (news) => {
      if (news.change?.fields?.calls || news.all) drawCalls();
      const phases = Object.values(news.change?.roles ?? {}).some((role) => role.fields.phase !== undefined);
      if (phases || news.all || news.change?.fields?.calls) again();
    },
  };
};

const NODES = 60;

page.views.placement = async () => {
  const body = h("div", { class: "nodes" }), more = h("div");
  let words = "", count = NODES;
  const draw = () => {
    const { job } = page, there = new Map(job.nodes.map((node) => [node, new Map()]));
    for (const role of job.roles) {
      role.ranks.forEach((row, rank) => {
        if (row[1] < 0) return;
        const slots = there.get(job.nodes[row[1]]), names = row[10].length ? row[10] : [""];
        for (const slot of names) slots.set(slot, [...(slots.get(slot) ?? []), [role, rank]]);
      });
    }
    const marks = (node) => [job.spares.includes(node) && "held back", job.tainted.includes(node) && "tainted", job.lost.includes(node) && "lost", job.left.includes(node) && "drained"].filter(Boolean).join(", ");
    const every = [...new Set([...job.nodes, ...job.spares, ...job.lost, ...job.left])].filter((node) => node.toLowerCase().includes(words));
    const order = (a, b) => a[0].localeCompare(b[0], undefined, { numeric: true });
    body.replaceChildren(
      ...every.slice(0, count).map((node) => {
        const slots = [...(there.get(node) ?? new Map())].sort(order);
        return h(
          "section",
          { class: "node", "aria-label": `Node ${node}` },
          h("div", { class: "row tight" }, h("h2", {}, node), marks(node) ? h("strong", { class: "small" }, marks(node)) : ""),
          slots.length
            ? h("ul", { class: "slots" }, slots.map(([slot, ranks]) => h("li", { class: "slot" }, h("span", { class: "quiet" }, slot === "" ? "no slot" : `slot ${slot}`), ranks.map(([role, rank]) => {
              const state = page.stateOf(role, rank);
              return h("span", { class: `chip ${page.word(state)}` }, page.rankLink(role.name, rank), h("span", { class: "unseen" }, state));
            }))))
            : h("p", { class: "quiet small" }, "It has no ranks."),
        );
      }),
    );
    more.replaceChildren(every.length > count ? h("p", {}, h("button", { type: "button", onclick: () => { count += 4 * NODES; draw(); } }, `${every.length - count} more nodes`)) : "");
  };
  draw();
  const again = page.throttled(1, async () => draw());
  const filter = h("input", { type: "search", placeholder: "name of a node", "aria-label": "Filter the nodes", oninput: (event) => { words = event.target.value.toLowerCase(); draw(); } });
  return {
    content: [h("div", { class: "row" }, h("h1", {}, "Placement"), h("span", { class: "grow" }), filter), body, more],
    update: (news) => { if (news.rows?.size || news.all) again(); },
  };
};

const CHARTS = 24;

page.views.metrics = async ({ query }) => {
  const body = h("div", { class: "charts" }), more = h("div"), others = h("span", { class: "row" });
  let axis = query.get("axis") ?? "", words = "", count = CHARTS;
  let beside = query.getAll("with"), found = [], charts = [];

  const whole = () => {
    const xs = found.flatMap((each) => each.data.series.flatMap((line) => [line.points.x[0] ?? 0, line.points.x.at(-1) ?? 0]));
    return xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
  };
  const zoom = page.zoom(() => draw());

  const load = async () => {
    if (axis === "") {
      const first = await page.get(`/api/jobs/${page.job.run_id}/metrics`, { axis: "time" });
      axis = first.names.some((each) => each.axes.includes("step")) ? "step" : "time";
    }
    found = await Promise.all([page.job.run_id, ...beside].map(async (job) => ({ job, data: await page.get(`/api/jobs/${encodeURIComponent(job)}/metrics`, { axis }) })));
  };

  const draw = () => {
    const focused = body.contains(document.activeElement);
    for (const each of charts) each.destroy();
    const byName = new Map();
    for (const { job, data } of found) {
      for (const line of data.series) {
        if (!line.name.toLowerCase().includes(words) || line.name.includes("/from/") || (axis === "step" && line.name === "step")) continue;
        const ranks = data.names.find((each) => each.role === line.role && each.name === line.name)?.ranks ?? 1;
        const label = `${found.length > 1 ? `${job} ` : ""}${line.role}${ranks > 1 ? `, mean of ${ranks}` : ""}`;
        byName.set(line.name, [...(byName.get(line.name) ?? []), { label, points: line.points }]);
      }
    }
    const names = [...byName.keys()];
    charts = names.slice(0, count).map((name) => page.chart(name, byName.get(name), axis, zoom));
    body.replaceChildren(...charts.map((each) => each.figure));
    for (const each of charts) each.draw();
    const out = found.reduce((sum, each) => sum + each.data.left_out, 0);
    more.replaceChildren(
      names.length > count ? h("p", {}, h("button", { type: "button", onclick: () => { count += CHARTS; draw(); } }, `${names.length - count} more`)) : "",
      names.length ? "" : h("p", { class: "quiet" }, axis === "step" ? "No metric with a step was reported." : "Nothing was reported yet."),
      out ? h("p", { class: "quiet" }, `The oldest ${page.size(out)} of the metrics are left out.`) : "",
    );
    if (focused) document.getElementById("main").focus({ preventScroll: true });
  };

  const again = page.throttled(1, async () => { await load(); draw(); });
  const drawOthers = async () => {
    if (page.report !== null) return;
    const { jobs } = await page.get("/api/jobs");
    const free = jobs.filter((job) => job.run_id !== page.job.run_id && !beside.includes(job.run_id)).slice(0, 200);
    others.replaceChildren(
      select("Beside it", [["", "no other job"], ...free.map((job) => [job.run_id, job.run_id])], "", (job) => { if (job) { beside.push(job); again(); drawOthers(); } }),
      ...beside.map((job) => h("button", { type: "button", "aria-label": `Without ${job}`, onclick: () => { beside = beside.filter((each) => each !== job); again(); drawOthers(); } }, `${job} ×`)),
    );
  };
  await load();
  await drawOthers();
  const filter = h("input", { type: "search", placeholder: "name of a metric", "aria-label": "Filter the metrics", oninput: (event) => { words = event.target.value.toLowerCase(); draw(); } });
  return {
    content: [
      h("div", { class: "row" }, h("h1", {}, "Metrics"), h("span", { class: "grow" }), others, select("Over", [["step", "steps"], ["time", "seconds since the start"]], axis, (value) => { axis = value; zoom.set(null); again(); }), h("span", { class: "row tight" }, zoom.buttons(whole)), filter),
      h("p", { class: "quiet small" }, "Drag over a chart to zoom into all of them, double-click to see all. The band behind a line has the least and the greatest of its ranks."),
      body, more,
    ],
    drawn: () => { draw(); page.resized = page.throttled(0.3, async () => draw()); },
    update: () => { if (zoom.range === null) again(); },
    left: () => { page.resized = null; for (const each of charts) each.destroy(); },
  };
};

page.views.timeline = async () => {
  const place = h("div"), marks = h("div"), buttons = h("span", { class: "row tight" });
  let lanes = null, data = await page.get(`/api/jobs/${page.job.run_id}/timeline`);
  const zoom = page.zoom(() => lanes?.draw());
  const draw = () => {
    const top = lanes?.element.scrollTop ?? 0;
    lanes = page.lanes(data, zoom);
    place.replaceChildren(lanes.element);
    lanes.element.scrollTop = top;
    lanes.draw();
    const rows = data.marks.slice(-200).reverse().map((mark) => [mark.at.toFixed(3), mark.kind, page.withLinks(mark.text)]);
    marks.replaceChildren(rows.length ? page.table([{ number: "Seconds" }, "Kind", "What"], rows, "Marked events") : h("p", { class: "quiet" }, "There are no failures and decisions."));
  };
  const again = page.throttled(1, async () => { data = await page.get(`/api/jobs/${page.job.run_id}/timeline`); draw(); });
  buttons.replaceChildren(...zoom.buttons(() => lanes.whole()));
  return {
    content: [
      h("div", { class: "row" }, h("h1", {}, "Timeline"), h("span", { class: "grow" }), h("span", { class: "legend" }, ["starting", "running", "unready", "done", "stopped", "failed"].map((state) => page.badge(state))), buttons),
      h("div", { class: "card" }, place),
      h("section", { class: "card" }, h("h2", {}, "Failures and decisions"), marks),
    ],
    drawn: () => { draw(); page.resized = () => lanes.draw(); },
    update: (news) => { if (news.events.length) again(); },
    left: () => { page.resized = null; },
  };
};

const PARTS = [["detect", "noticed after"], ["decide", "decided after"], ["respawn", "a new process after"], ["rejoin", "all ranks run after"], ["away", "away in all"], ["useful", "new work after"]];

// The stacks of the ranks. They are asked for these when the button is pressed, and at no other time.

page.views.stacks = async () => {
  if (page.job.ended !== null) return { content: [h("h1", {}, "Stacks"), h("p", { class: "quiet" }, "This job is over, and its ranks have no stacks any more.")] };
  const body = h("div");
  const group = (each) => h("details", { open: true }, h("summary", {}, h("strong", {}, each.who), each.state ? ` ${each.state}` : ""), each.frames.length ? h("pre", { class: "log", tabindex: "0" }, each.frames.join("\n")) : "");
  const section = (role) =>
    h("section", { class: "card", "aria-label": `Stacks of ${role.name}` }, h("h2", {}, role.name), role.groups.map(group), role.meetings.length ? [h("h3", {}, "Collectives"), role.meetings.map((text) => h("p", { class: "mono" }, text))] : "");
  const take = async () => {
    button.disabled = true;
    body.replaceChildren(h("p", { class: "quiet" }, "The ranks are asked …"));
    try {
      const { roles, silent } = await page.get(`/api/jobs/${page.job.run_id}/stacks`);
      const none = h("p", { class: "quiet" }, "No rank has a process now.");
      body.replaceChildren(silent.length ? h("p", { class: "alert bad" }, `No answer from ${silent.join(", ")}`) : "", ...(roles.length ? roles.map(section) : [none]));
      page.announce("The stacks are there.");
    } catch (error) {
      body.replaceChildren(h("p", { role: "alert" }, error.message));
    }
    button.disabled = false;
  };
  const button = h("button", { onclick: take }, "Take stacks");
  return {
    content: [
      h("div", { class: "row" }, h("h1", {}, "Stacks"), h("span", { class: "grow" }), button),
      h("p", { class: "quiet" }, "Where each rank is now. Equal stacks are shown once, the odd ones first."),
      body,
    ],
  };
};

page.views.failures = async () => {
  const body = h("div");
  const open = new Set();
  const entry = (each) => {
    const { record } = each, words = record.traceback || record.message || record.tail;
    const facts = [
      ["likely cause", `${record.cause} (${record.kind})`], ["noticed by", `${record.rule}${record.note ? ` (${record.note})` : ""}`], ["decided", record.decision ? page.withLinks(record.decision) : "nothing more, as that of an earlier failure was being carried out"],
      ["where", `${record.node}${record.slots.length ? `, slot ${record.slots.join(", ")}` : ""}, incarnation ${record.incarnation}, generation ${record.generation}${record.step >= 0 ? `, step ${record.step}` : ""}`],
      ["affected", record.affected.length ? record.affected.map((text) => h("div", {}, page.withLinks(text))) : ""],
      ["took", PARTS.filter(([part]) => each.durations[part] !== null).map(([part, text]) => `${text} ${page.duration(each.durations[part])}`).join(", ")],
      ["steps lost", each.steps_lost === null ? "" : String(each.steps_lost)],
    ].filter(([, value]) => value !== "");
    return h(
      "details",
      { open: open.has(each.number), ontoggle: (event) => { if (event.target.open) open.add(each.number); else open.delete(each.number); } },
      h("summary", {}, h("strong", {}, `${record.role}:${record.rank} `), `${record.exit}, `, h("span", {}, record.cause), h("span", { class: "quiet" }, ` · ${(record.time - page.job.started).toFixed(1)} s after the start${record.inferred ? " · inferred" : ""}`)),
      h("div", { class: "row small" }, page.rankLink(record.role, record.rank), h("a", { href: page.href(["job", page.job.run_id, "logs"], { rank: `${record.role}:${record.rank}`, incarnation: record.incarnation }) }, "Its log")),
      h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      words ? [h("h2", {}, record.traceback || record.message ? "Error" : "The end of its output"), h("pre", { class: "error", tabindex: "0" }, words)] : "",
      h("h2", {}, "What led to it, and what followed"),
      eventTable(each.events, page.job.started, `Events around failure ${each.number}`),
    );
  };
  const draw = async () => {
    const { failures, failed } = await page.get(`/api/jobs/${page.job.run_id}/failures`);
    if (failures.length && open.size === 0 && body.childElementCount === 0) open.add(failures[0].number);
    body.replaceChildren(...(failures.length ? failures.map(entry) : [h("p", { class: "quiet" }, "This job has had no failure.")]), failed > failures.length ? h("p", { class: "quiet" }, `The last ${failures.length} of ${failed}.`) : "");
  };
  await draw();
  const again = page.throttled(1, draw);
  return {
    content: [h("h1", {}, "Failures"), h("div", { class: "card" }, body)],
    update: (news) => { if (news.events.some((event) => ["failure", "decision", "running", "caught_up", "resumed"].includes(event.kind))) again(); },
  };
};

// Colours and cursor movements of terminals, and lines that were drawn over.
const plain = (text) => text.replace(/\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))/g, "").replace(/^.*\r(?!\n|$)/gm, "").replace(/\r/g, "");

page.views.logs = async ({ query }) => {
  const { job } = page;
  const named = (query.get("rank") ?? "").split(":");
  let role = job.roles.find((each) => each.name === named[0]) ?? job.roles[0];
  let rank = Math.min(Number(named[1] ?? 0) || 0, role.ranks.length - 1);
  let files = [], file = null, start = 0, end = 0, follow = page.report === null, timer = null;
  const text = h("pre", { class: "log", tabindex: "0", "aria-label": "Log" }), about = h("p", { class: "quiet small" }), found = h("div"), chooser = h("span", { class: "row" });
  const of = (each) => ({ role: role.name, rank, attempt: each.attempt, folder: each.folder, incarnation: each.incarnation, stream: each.stream });
  const name = (each) => `${files.some((other) => other.attempt !== each.attempt) ? `attempt ${each.attempt}, ` : ""}incarnation ${each.incarnation}, ${each.stream}${files.some((other) => other.folder !== each.folder) ? `, directory ${each.folder}` : ""} (${page.size(each.size)})`;

  const say = (part) => { about.textContent = part.size === 0 ? "It is empty." : start > 0 ? `From byte ${start.toLocaleString("en")} of ${part.size.toLocaleString("en")}.` : `All of it, ${page.size(part.size)}.`; };

  const load = async (position = {}) => {
    if (file === null) {
      text.textContent = "";
      about.textContent = "This rank has no logs here.";
      return;
    }
    try {
      const part = await page.get(`/api/jobs/${job.run_id}/log`, { ...of(file), ...position });
      [start, end] = [part.start, part.end];
      text.textContent = plain(part.text);
      say(part);
      text.scrollTop = text.scrollHeight;
    } catch (error) {
      text.textContent = "";
      about.textContent = error.message;
    }
  };

  const older = async () => {
    if (start === 0 || file === null) return;
    setFollow(false);
    const part = await page.get(`/api/jobs/${job.run_id}/log`, { ...of(file), before: start });
    const height = text.scrollHeight;
    text.prepend(plain(part.text));
    start = part.start;
    say(part);
    text.scrollTop = text.scrollHeight - height;
  };

  const newer = async () => {
    if (file === null || document.hidden) return;
    const part = await page.get(`/api/jobs/${job.run_id}/log`, { ...of(file), after: end });
    if (part.size < end || part.start !== end) {
      await load();
      return;
    }
    if (part.text === "") return;
    const below = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    text.append(plain(part.text));
    end = part.end;
    say(part);
    if (below) text.scrollTop = text.scrollHeight;
  };

  const button = h("button", { type: "button", "aria-pressed": String(follow), onclick: () => setFollow(!follow) }, "Follow");
  const setFollow = (on) => {
    follow = on;
    button.setAttribute("aria-pressed", String(on));
    if (on) load();
  };

  const choose = async (wanted = {}) => {
    try {
      files = (await page.get(`/api/jobs/${job.run_id}/rank`, { role: role.name, rank })).logs;
    } catch {
      files = [];
    }
    const newest = [...files].reverse();
    const fits = (each) => (wanted.incarnation === undefined || String(each.incarnation) === wanted.incarnation) && (wanted.stream === undefined || each.stream === wanted.stream);
    file = newest.find((each) => fits(each) && each.size > 0) ?? newest.find(fits) ?? newest.find((each) => each.size > 0) ?? newest[0] ?? null;
    drawChooser();
    await load();
  };

  const drawChooser = () => chooser.replaceChildren(
    select("Role", job.roles.map((each) => [each.name, each.name]), role.name, (value) => { role = job.roles.find((each) => each.name === value); rank = 0; choose(); }),
    h("label", {}, "Rank", h("input", { type: "number", min: "0", max: String(role.ranks.length - 1), value: String(rank), onchange: (event) => { rank = Math.max(0, Math.min(role.ranks.length - 1, Number(event.target.value) || 0)); choose(); } })),
    files.length ? select("File", files.map((each, n) => [String(n), name(each)]), String(files.indexOf(file)), (value) => { file = files[Number(value)]; load(); }) : "",
  );

  const search = async (words, before) => {
    if (!words || file === null) {
      found.replaceChildren();
      return;
    }
    const lower = words.toLowerCase();
    try {
      const { matches, down_to: downTo } = page.report === null ? await page.get(`/api/jobs/${job.run_id}/search`, { ...of(file), words, before }) : within(lower);
      const marked = (line) => {
        const at = line.toLowerCase().indexOf(lower);
        return at < 0 ? line : [line.slice(0, at), h("mark", {}, line.slice(at, at + words.length)), line.slice(at + words.length)];
      };
      found.replaceChildren(
        h("p", { class: "small", role: "status" }, `${matches.length} ${matches.length === 1 ? "line" : "lines"}, the last one first${downTo > 0 ? `, in the part from byte ${downTo.toLocaleString("en")} on` : ""}`),
        h("ul", { class: "found mono" }, matches.map((each) => h("li", {}, h("button", { type: "button", onclick: () => { setFollow(false); load({ before: each.at + each.line.length + 4096 }); } }, marked(plain(each.line).slice(0, 300)))))),
        downTo > 0 ? h("button", { type: "button", onclick: () => search(words, downTo) }, "Search further back") : "",
      );
    } catch (error) {
      found.replaceChildren(h("p", {}, error.message));
    }
  };
  const within = (lower) => ({ matches: text.textContent.split("\n").filter((line) => line.toLowerCase().includes(lower)).reverse().slice(0, 200).map((line) => ({ at: 0, line })), down_to: 0 });

  const words = h("input", { type: "search", placeholder: "words", "aria-label": "Search this log" });
  const form = h("form", { class: "row tight", onsubmit: (event) => { event.preventDefault(); search(words.value); } }, words, h("button", {}, "Search"));
  await choose({ incarnation: query.get("incarnation") ?? undefined });
  if (page.report === null) timer = setInterval(() => { if (follow) newer().catch(() => {}); }, 1000);
  return {
    content: [
      h("div", { class: "row" }, h("h1", {}, "Logs"), h("span", { class: "grow" }), chooser),
      h("div", { class: "card" }, h("div", { class: "row" }, page.report === null ? [h("button", { type: "button", onclick: older }, "Older"), button] : "", form, about), found, text),
    ],
    drawn: () => { text.scrollTop = text.scrollHeight; },
    placed: (now) => {
      const [other, number] = (now.get("rank") ?? "").split(":");
      const known = job.roles.find((each) => each.name === other);
      if (known) { [role, rank] = [known, Number(number) || 0]; choose({ incarnation: now.get("incarnation") ?? undefined }); }
    },
    left: () => clearInterval(timer),
  };
};

page.views.events = async () => {
  const { events, all } = await page.get(`/api/jobs/${page.job.run_id}/events`);
  const body = h("div"), known = new Set(events.map((event) => event.id));
  const take = (news) => { for (const event of news) if (!known.has(event.id)) { known.add(event.id); events.push(event); } };
  // Those that have come while the others were fetched.
  take(page.job.events.filter((event) => event.time >= (events.at(-1)?.time ?? 0)));
  let words = "", kind = "";
  const draw = () => {
    const fits = events.filter((event) => (!kind || event.kind === kind) && (!words || `${event.text} ${event.about.join(" ")}`.toLowerCase().includes(words)));
    body.replaceChildren(eventTable(fits.slice(-500).reverse(), page.job.started, "Events"), fits.length > 500 ? h("p", { class: "quiet" }, `The last 500 of ${fits.length}.`) : "");
  };
  draw();
  const again = page.throttled(0.5, async () => draw());
  const kinds = [...new Set(events.map((event) => event.kind))].sort();
  const filter = h("input", { type: "search", placeholder: "words or actor:2", "aria-label": "Filter the events", oninput: (event) => { words = event.target.value.toLowerCase(); draw(); } });
  return {
    content: [
      h("div", { class: "row" }, h("h1", {}, "Events"), h("span", { class: "grow" }), select("Kind", [["", "all"], ...kinds.map((each) => [each, each])], "", (value) => { kind = value; draw(); }), filter),
      h("div", { class: "card" }, all > events.length ? h("p", { class: "quiet" }, `The last ${events.length} of ${all}.`) : "", body),
    ],
    update: (news) => { if (news.events.length) { take(news.events); again(); } },
  };
};
