// Charts of the server, drawn from /metrics, which is read once a second while the tab is visible.

import { element } from "./answer.js";

const KEPT = 120; // readings, one a second
const PERIOD = 1000; // milliseconds
const GAIN_READINGS = 10; // over which the speed-up is taken, because single seconds vary much
const SVG = "http://www.w3.org/2000/svg";

// --- reading /metrics --------------------------------------------------------------------------------

// Prometheus' text as a list of {name, labels, value}. The names come without the server's prefix.
export function samples(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = /^[\w]+:(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value;
    }
    found.push({ name: match[1], labels, value: match[3] === "+Inf" ? Infinity : Number(match[3]) });
  }
  return found;
}

// The figures that the charts need, out of one reading of /metrics.
function reading(text) {
  const now = { at: performance.now(), buckets: new Map(), positions: new Map(), steps: new Map() };
  const names = {
    generation_tokens_total: "tokens",
    spec_decode_num_drafts_total: "drafts",
    spec_decode_drafter_healthy: "healthy",
    spec_decode_seconds_total: "seconds",
    spec_decode_seconds_without_drafts_total: "without",
    num_requests_running: "running",
    num_requests_waiting: "waiting",
    inter_token_latency_seconds_sum: "gapSum",
    inter_token_latency_seconds_count: "gapCount",
  };
  for (const { name, labels, value } of samples(text)) {
    if (name in names) now[names[name]] = value;
    else if (name === "inter_token_latency_seconds_bucket") {
      now.buckets.set(labels.le === "+Inf" ? Infinity : Number(labels.le), value);
    } else if (name === "spec_decode_num_accepted_tokens_per_pos_total") {
      now.positions.set(Number(labels.position), value);
    } else if (name === "spec_decode_k_steps_total") {
      now.steps.set(`${labels.k} ${labels.reason}`, value);
    }
  }
  return now;
}

// The bound below which a share of the gaps lies that came between two readings, in seconds.
function quantile(before, now, share) {
  const bounds = [...now.buckets.keys()].sort((a, b) => a - b);
  const total = now.gapCount - before.gapCount;
  if (total <= 0) return null;
  let below = 0;
  let previous = 0;
  for (const bound of bounds) {
    const count = now.buckets.get(bound) - (before.buckets.get(bound) || 0);
    if (count >= share * total) {
      if (bound === Infinity) return previous;
      return previous + ((bound - previous) * (share * total - below)) / Math.max(count - below, 1);
    }
    [below, previous] = [count, bound];
  }
  return null;
}

// The mean K of the steps between two readings, and the commonest reason for it; nulls without steps.
function draftLength(before, now) {
  let [steps, sum, most, why] = [0, 0, 0, null];
  for (const [key, value] of now.steps) {
    const [k, reason] = key.split(" ");
    const count = value - (before.steps.get(key) || 0);
    steps += count;
    sum += count * Number(k);
    if (count > most) [most, why] = [count, reason];
  }
  return [steps > 0 ? sum / steps : null, why];
}

const REASONS = {
  gain: "this K promises most tokens a second",
  no_gain: "no draft would pay for itself",
  probe: "a trial of what drafts yield or cost",
  fixed: "set by the configuration",
  requests: "no request wants drafts",
  unhealthy: "the watchdog stopped the drafter",
  health_probe: "the watchdog tries the drafter again",
};

// --- drawing -----------------------------------------------------------------------------------------

class Lines {
  constructor(parent, title, unit, series) {
    this.unit = unit;
    this.series = series; // names; the first is drawn solid, the second dashed
    this.points = series.map(() => []);
    const figure = element("figure");
    const caption = element("figcaption");
    this.title = title;
    this.value = element("b", "", "–");
    caption.append(element("span", "", title), this.value);
    this.plot = document.createElementNS(SVG, "svg");
    this.plot.setAttribute("class", "plot");
    this.plot.setAttribute("viewBox", `0 0 ${KEPT - 1} 100`);
    this.plot.setAttribute("preserveAspectRatio", "none");
    this.plot.setAttribute("role", "img");
    this.paths = series.map((_, index) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", index ? "second" : "first");
      this.plot.append(path);
      return path;
    });
    const scale = element("div", "scale");
    this.top = element("span");
    this.note = element("span", "", series.length > 1 ? `solid: ${series[0]}, dashed: ${series[1]}` : "");
    scale.append(this.note, this.top);
    figure.append(caption, this.plot, scale);
    parent.append(figure);
  }

  // Adds a value to each series; null leaves a gap.
  add(values) {
    values.forEach((value, index) => {
      this.points[index].push(value);
      if (this.points[index].length > KEPT) this.points[index].shift();
    });
    const known = this.points.flat().filter((value) => value !== null);
    const most = Math.max(...known, 0);
    const start = KEPT - this.points[0].length;
    this.paths.forEach((path, index) => {
      let pen = "M";
      const drawn = this.points[index].map((value, at) => {
        if (value === null) {
          pen = "M";
          return "";
        }
        const piece = `${pen}${start + at} ${(98 - (94 * value) / (most || 1)).toFixed(1)}`;
        pen = "L";
        return piece;
      });
      path.setAttribute("d", drawn.join(""));
    });
    const shown = values.map((value) => (value === null ? "–" : this.format(value))).join(" / ");
    this.value.textContent = `${shown}${this.unit && ` ${this.unit}`}`;
    this.top.textContent = known.length ? `highest ${this.format(most)}` : "";
    const named = this.series.map((name, index) =>
      `${name} ${values[index] === null ? "unknown" : this.format(values[index])}`);
    this.plot.setAttribute("aria-label", `${this.title}: ${named.join(", ")} ${this.unit}`);
  }

  format(value) {
    return value.toLocaleString("en", { maximumSignificantDigits: value < 100 ? 2 : 4 });
  }
}

class Positions {
  constructor(parent) {
    const figure = element("figure");
    const caption = element("figcaption");
    this.value = element("b", "", "–");
    caption.append(element("span", "", "Acceptance by position"), this.value);
    this.list = element("ol", "positions");
    figure.append(caption, this.list);
    parent.append(figure);
    this.rows = new Map();
  }

  show(before, now) {
    const drafts = now.drafts - before.drafts;
    this.value.textContent = drafts > 0 ? "" : "no drafts";
    for (const position of [...now.positions.keys()].sort((a, b) => a - b)) {
      if (!this.rows.has(position)) this.addRow(position);
      const count = now.positions.get(position) - (before.positions.get(position) || 0);
      const share = drafts > 0 ? count / drafts : 0;
      const { bar, value } = this.rows.get(position);
      bar.style.width = `${100 * share}%`;
      value.textContent = drafts > 0 ? `${Math.round(100 * share)} %` : "–";
    }
  }

  addRow(position) {
    const row = element("li");
    const bar = element("span", "bar");
    const value = element("span", "value");
    row.append(element("span", "", `Draft ${position + 1}`), bar, value);
    this.list.append(row);
    this.rows.set(position, { bar, value });
  }
}

// --- the loop ----------------------------------------------------------------------------------------

export function startCharts(parent) {
  const fault = element("p", "fault");
  fault.hidden = true;
  parent.before(fault);
  const speed = new Lines(parent, "Tokens a second", "", ["tokens"]);
  let gain = null; // made once the server has measured a gain, which it does not with a fixed K
  const length = new Lines(parent, "Draft length K, mean of the steps", "", ["K"]);
  const positions = new Positions(parent);
  const gaps = new Lines(parent, "Time between tokens", "ms", ["mean", "95th percentile"]);
  const requests = new Lines(parent, "Requests", "", ["running", "waiting"]);
  let kept = []; // readings, the oldest first

  function draw(now) {
    const before = kept.at(-1);
    if (before && now.tokens < before.tokens) kept = []; // the server was restarted
    if (kept.length) {
      const last = kept.at(-1);
      const seconds = (now.at - last.at) / 1000;
      speed.add([(now.tokens - last.tokens) / seconds]);
      const count = now.gapCount - last.gapCount;
      const mean = count > 0 ? (1000 * (now.gapSum - last.gapSum)) / count : null;
      const slow = quantile(last, now, 0.95);
      gaps.add([mean, slow === null ? null : 1000 * slow]);
      positions.show(kept[0], now);
      const earlier = kept.at(-GAIN_READINGS) || kept[0];
      const took = now.seconds - earlier.seconds;
      if (gain === null && now.seconds > 0) gain = new Lines(parent, "Speed-up by drafts", "times", ["measured"]);
      if (gain) gain.add([took > 0 ? (now.without - earlier.without) / took : null]);
      const [k, why] = draftLength(last, now);
      length.add([k]);
      if (why) length.note.textContent = REASONS[why] || why;
    }
    if (now.healthy === 0) length.note.textContent = REASONS.unhealthy;
    requests.add([now.running, now.waiting]);
    kept.push(now);
    if (kept.length > KEPT) kept.shift();
  }

  async function poll() {
    try {
      if (!document.hidden) {
        const reply = await fetch("metrics", { cache: "no-store" });
        if (!reply.ok) throw new Error(`/metrics answered ${reply.status}.`);
        draw(reading(await reply.text()));
        fault.hidden = true;
      }
    } catch (error) {
      fault.textContent = `No figures: ${error.message}`;
      fault.hidden = false;
    }
    setTimeout(poll, PERIOD);
  }
  poll();
}
