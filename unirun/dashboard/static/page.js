// The frame of the page: where the data comes from, which view is shown, and what happens while it is.
"use strict";

const page = {};

// Elements. Text is only ever set as text, so that no log line, name or message is read as markup.

page.h = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
};

page.badge = (state, text = state) => page.h("span", { class: `badge ${page.word(state)}` }, text);

// A word of ours as the name of a class; anything else would be somebody's text.
page.word = (text) => (/^[a-z]+$/.test(text) ? text : "");

page.table = (headers, rows, label) =>
  page.h(
    "div",
    { class: "wide", tabindex: "0", role: "region", "aria-label": label },
    page.h(
      "table",
      {},
      page.h("thead", {}, page.h("tr", {}, headers.map((each) => page.h("th", { scope: "col", class: each.number ? "number" : "" }, each.number ?? each)))),
      page.h("tbody", {}, rows.map((row) => page.h("tr", {}, row.map((cell, n) => page.h("td", { class: headers[n].number ? "number" : "" }, cell ?? ""))))),
    ),
  );

page.announce = (text) => { document.getElementById("announce").textContent = text; };

// Words for figures.

page.duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  for (const [size, unit, smaller, name] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole >= size) return `${Math.floor(whole / size)} ${unit} ${Math.floor((whole % size) / smaller)} ${name}`;
  }
  return `${whole} s`;
};

page.size = (bytes) => {
  if (bytes === null || bytes === undefined) return "";
  let [number, unit] = [bytes, "B"];
  for (const next of ["kB", "MB", "GB", "TB"]) {
    if (number < 1000) break;
    [number, unit] = [number / 1000, next];
  }
  return `${number < 10 && unit !== "B" ? number.toFixed(1) : Math.round(number)} ${unit}`;
};

page.figure = (value) => (value === null || value === undefined ? "nan" : Number(value.toPrecision(5)).toString());

page.clock = (time) => new Date(time * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });

// A time that goes on while it is shown.
page.since = (from, until) =>
  page.h("span", until === null || until === undefined ? { "data-since": from } : {}, page.duration((until ?? page.now()) - from));

setInterval(() => {
  for (const each of document.querySelectorAll("[data-since]")) each.textContent = page.duration(page.now() - each.dataset.since);
}, 1000);

// The data: of a server, or, in a report, what the file has.

const embedded = document.getElementById("data");
page.report = embedded === null ? null : JSON.parse(embedded.textContent);

page.now = () => (page.report === null ? Date.now() / 1000 : page.report.now);

page.get = async (path, query = {}) => {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== undefined && value !== null)).toString();
  const whole = words ? `${path}?${words}` : path;
  if (page.report !== null) {
    const found = page.report.answers[whole] ?? page.report.answers[path];
    if (found === undefined) throw new Error("This is not in the report.");
    return found;
  }
  const answer = await fetch(whole, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
};

// What is new. `page.job` is the job that is shown, as far as it is known.

page.job = null;
let source = null;
let followed = "";

const tellLive = (text, kind = "") => {
  const element = document.getElementById("live");
  if (element.textContent === text) return;
  element.textContent = text;
  element.className = kind;
};

page.follow = (path, take, query = "") => {
  if (page.report !== null) {
    tellLive(`as of ${page.clock(page.report.now)}`);
    return;
  }
  if (followed === path) return;
  page.unfollow();
  followed = path;
  source = new EventSource(path + query);
  source.onopen = () => tellLive("live", "on");
  source.onerror = () => tellLive(source.readyState === EventSource.CLOSED ? "not let in: open a new link" : "the server does not answer", "lost");
  source.onmessage = (event) => take(JSON.parse(event.data));
};

page.unfollow = () => {
  if (source !== null) source.close();
  source = null;
  followed = "";
};

page.failedLately = new Map();
const FAILED_SHOWN = 2500;

// Whether a rank has failed a moment ago: it may be there again before anybody has seen that.
page.hasFailed = (role, rank) => (page.failedLately.get(`${role}:${rank}`) ?? 0) > Date.now();

const AGAIN = 1000;

// Shows the job that has an id now: that of a job that is gone may be another one's. Its events are none of the first.
const showAgain = async (id) => {
  const found = await page.get(`/api/jobs/${encodeURIComponent(id)}`).catch(() => null);
  if (page.job?.run_id !== id || followed !== "") return;
  if (found === null) {
    setTimeout(showAgain, AGAIN, id);
    return;
  }
  page.job = found;
  page.redraw();
};

const applyNews = (news) => {
  if (news.gone) {
    tellLive(news.gone, "lost");
    page.unfollow();
    setTimeout(showAgain, AGAIN, page.job.run_id);
    return;
  }
  const change = news.change ?? {};
  const rows = new Map();
  let whole = false;
  if (change.all) {
    const roles = change.all.roles, { roles: before } = page.job;
    whole = roles.length !== before.length || roles.some((role, n) => role.name !== before[n].name || role.ranks.length !== before[n].ranks.length);
    // The roles that are drawn stay the same objects, so that nothing loses the focus.
    if (!whole) {
      roles.forEach((role, n) => { Object.assign(before[n], role); rows.set(role.name, [...role.ranks.keys()]); });
    }
    page.job = { ...page.job, ...change.all, roles: whole ? roles : before };
  }
  Object.assign(page.job, change.fields ?? {});
  for (const role of page.job.roles) {
    const changed = (change.roles ?? {})[role.name];
    if (changed === undefined) continue;
    Object.assign(role, changed.fields);
    rows.set(role.name, Object.keys(changed.ranks).map(Number));
    for (const [rank, row] of Object.entries(changed.ranks)) role.ranks[rank] = row;
  }
  for (const event of news.events) {
    page.job.events.push(event);
    if (event.kind !== "failure") continue;
    const who = event.about[0] ?? "";
    page.failedLately.set(who, Date.now() + FAILED_SHOWN);
    const [role, rank] = who.split(":");
    rows.set(role, [...(rows.get(role) ?? []), Number(rank)]);
    setTimeout(() => view.update?.({ rows: new Map([[role, [Number(rank)]]]), events: [], change: {} }), FAILED_SHOWN + 50);
    page.announce(event.text);
  }
  page.job.events.splice(0, Math.max(0, page.job.events.length - 2000));
  view.update?.({ rows, events: news.events, change, all: whole });
};

// Views by their place: `#/job/ID/VIEW?…`.

page.views = {};
page.jobViews = ["overview", "graph", "placement", "metrics", "timeline", "failures", "logs", "events", "stacks"];
// A report is of a job that nobody can ask any more.
if (page.report !== null) page.jobViews.pop();
let view = {};
let shown = "";

page.place = () => {
  const [path, words] = location.hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: new URLSearchParams(words ?? "") };
};

page.href = (parts, query = {}) => {
  const words = new URLSearchParams(query).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${words ? `?${words}` : ""}`;
};

page.rankLink = (role, rank) =>
  page.h("a", { href: page.href(["job", page.job.run_id, "overview"], { rank: `${role}:${rank}` }) }, `${role}:${rank}`);

// Names of ranks in a text as links.
page.withLinks = (text) =>
  text.split(/(\b[\w.-]+:\d+\b)/).map((part, n) => {
    const [role, rank] = part.split(":");
    const known = n % 2 === 1 && page.job !== null && page.job.roles.some((each) => each.name === role && Number(rank) < each.ranks.length);
    return known ? page.rankLink(role, rank) : part;
  });

const title = (name) => name[0].toUpperCase() + name.slice(1);

const showFrame = (parts) => {
  const job = parts[0] === "job" ? parts[1] : null;
  const crumbs = document.getElementById("crumbs");
  const own = page.report === null;
  crumbs.replaceChildren(
    ...(own ? [page.h("a", { href: "#/" }, "Jobs"), " · ", page.h("a", { href: "#/experiments" }, "Experiments")] : []),
    ...(job ? [own ? " · " : "", page.h("strong", {}, job)] : []),
  );
  const tabs = document.getElementById("tabs");
  tabs.hidden = job === null;
  const at = parts[2] ?? "overview";
  tabs.replaceChildren(
    ...(job === null ? [] : page.jobViews.map((name) => page.h("a", { href: page.href(["job", job, name]), "aria-current": name === at ? "page" : null }, title(name)))),
  );
  document.title = job ? `${job} · ${at} · unirun` : "unirun";
};

const show = async () => {
  const { parts, query } = page.place();
  if (page.report !== null && parts[0] !== "job") {
    location.hash = page.href(["job", page.report.run_id, "overview"]);
    return;
  }
  const name = parts[0] === "job" ? (parts[2] ?? "overview") : (parts[0] ?? "jobs");
  const now = `${parts[0]}/${parts[1]}/${name}`;
  if (now === shown && view.placed) {
    view.placed(query);
    return;
  }
  const first = shown === "";
  shown = now;
  view.left?.();
  view = {};
  showFrame(parts);
  const main = document.getElementById("main");
  try {
    if (parts[0] === "job") {
      if (page.job === null || page.job.run_id !== parts[1]) {
        page.unfollow();
        page.job = await page.get(`/api/jobs/${encodeURIComponent(parts[1])}`);
      }
    } else page.job = null;
    const made = await (page.views[name] ?? page.views.jobs)({ parts, query });
    if (shown !== now) return;
    view = made;
    main.replaceChildren(...made.content);
    view.drawn?.();
    if (!first) main.focus({ preventScroll: true });
    if (page.job !== null) page.follow(`/api/jobs/${encodeURIComponent(page.job.run_id)}/live`, applyNews, `?after=${page.job.all}`);
    else page.follow("/api/live", (news) => view.update?.(news));
  } catch (error) {
    if (shown === now) main.replaceChildren(page.h("h1", {}, "This cannot be shown"), page.h("p", { role: "alert" }, error.message));
  }
};

page.redraw = () => { shown = "again"; show(); };

// Asks again after some time at most, however often something happens.
page.throttled = (seconds, act) => {
  let waiting = false, last = 0;
  return () => {
    if (waiting) return;
    waiting = true;
    setTimeout(async () => {
      waiting = false;
      last = Date.now();
      await act().catch(() => {});
    }, Math.max(0, last + seconds * 1000 - Date.now()));
  };
};

// Colours.

page.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const setTheme = (theme) => {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
};

const stored = () => { try { return localStorage.getItem("unirun-theme"); } catch { return null; } };

setTheme(stored() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  try { localStorage.setItem("unirun-theme", theme); } catch { /* A file that is opened has none. */ }
  page.redraw();
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});

addEventListener("hashchange", show);
addEventListener("DOMContentLoaded", show);
