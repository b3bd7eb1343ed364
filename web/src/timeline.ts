// What happened when: one lane for each kind of event, and a table of the steps.
import uPlot from "uplot";
import type { App, Panel } from "./app";
import { button, el, fill } from "./dom";
import { seconds, shortened, tick } from "./format";
import { Table } from "./table";
import { colour, onTheme } from "./theme";
import type { Event, Step } from "./types";

const LANES = ["record", "compile", "run", "collective", "sync", "fallback", "idle"];
const WORDS: Record<string, string> = { sync: "wait" };
const LANE = new Map(LANES.map((kind) => [kind, kind])); // which lane shows an event
LANE.set("load", "compile").set("keep", "compile"); // compiled graphs from disk, and to it
const PARTS: (keyof Step)[] = ["record", "compile", "run", "idle"];
const HEIGHT = 285;
const OF_A_RANK = /^rank \d+$/; // events of other ranks: a lane for each

export class Timeline implements Panel {
  readonly title = "Timeline";
  readonly element: HTMLElement;
  private frame = el("div", { class: "chart" });
  private about = el("p", { class: "about", "aria-live": "polite" });
  private steps: Table<Step>;
  private plot: uPlot | null = null;
  private bars: Event[] = [];
  private seen = "";
  private empty = el("p", {}, "Nothing has run yet.");

  constructor(private app: App) {
    this.steps = new Table<Step>("Steps: where the time went", [
      { title: "Step", cell: (s) => String(s.number), key: (s) => s.number, number: true },
      { title: "Start", cell: (s) => seconds(s.start), key: (s) => s.start, number: true },
      { title: "Took", cell: (s) => seconds(s.seconds), key: (s) => s.seconds, number: true },
      ...(["record", "compile", "run", "wait", "idle"] as const).map((part) => ({
        title: part[0].toUpperCase() + part.slice(1),
        cell: (s: Step) => seconds(s[part]),
        key: (s: Step) => s[part],
        number: true,
      })),
      { title: "Share", cell: share },
    ]);
    const tools = el("div", { class: "tools", role: "toolbar", "aria-label": "Timeline" },
      button("+", () => this.zoom(0.5), "Zoom in"),
      button("−", () => this.zoom(2), "Zoom out"),
      button("◂", () => this.move(-0.25), "Earlier"),
      button("▸", () => this.move(0.25), "Later"),
      button("All", () => this.reset(), "Show all of the time"),
      legend(),
    );
    this.frame.tabIndex = 0;
    this.frame.setAttribute("role", "img");
    this.frame.addEventListener("keydown", (event) => this.key(event));
    this.element = el("div", { class: "stack" },
      el("h2", {}, "Timeline"), tools, this.empty, this.frame, this.about, this.steps.element,
    );
    onTheme(() => this.redraw());
    new ResizeObserver(() => this.resize()).observe(this.frame);
  }

  show(): void {
    const { events, steps, state } = this.app.summary;
    if (state === this.seen && this.plot) return this.resize();
    this.seen = state;
    this.empty.hidden = events.length > 0;
    this.frame.hidden = events.length === 0;
    for (const [kind] of events) if (OF_A_RANK.test(kind) && !LANE.has(kind)) addLane(kind);
    const bars = events.flatMap((event) => withoutWaits(event, events));
    this.bars = [...bars, ...idleTimes(bars)];
    this.steps.set([...steps].reverse());
    this.frame.setAttribute("aria-label", describe(events, steps));
    this.redraw();
  }

  private redraw(): void {
    const kept = this.plot && { ...this.plot.scales.x };
    const whole = this.plot ? this.isWhole() : true;
    this.plot?.destroy();
    this.plot = null;
    if (this.frame.hidden || !this.frame.clientWidth || !this.bars.length) return;
    const end = Math.max(...this.bars.map((bar) => bar[1] + bar[2]));
    const text = colour("text-soft"), line = colour("line");
    this.plot = new uPlot(
      {
        width: this.frame.clientWidth,
        height: height(),
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
        scales: { x: { time: false }, y: { range: [0, LANES.length] } },
        axes: [
          {
            stroke: text, size: 36, grid: { stroke: line, width: 1 }, ticks: { stroke: line },
            values: (_, ticks) => ticks.map(tick),
          },
          {
            stroke: text, size: 76, grid: { stroke: line, width: 1 }, ticks: { show: false },
            splits: () => LANES.map((_, i) => i + 0.5),
            values: () => [...LANES].reverse().map((lane) => WORDS[lane] ?? lane),
          },
        ],
        series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
        hooks: {
          draw: [(plot) => this.draw(plot)],
          setCursor: [(plot) => this.point(plot)],
          ready: [(plot) => plot.over.addEventListener("click", () => this.click(plot))],
        },
      },
      [[0, end], [0, 0]],
      this.frame,
    );
    if (kept && !whole && kept.min !== undefined && kept.max !== undefined) {
      this.plot.setScale("x", { min: kept.min!, max: kept.max! });
    }
  }

  private isWhole(): boolean {
    const scale = this.plot?.scales.x, data = this.plot?.data[0];
    return !scale || !data || (scale.min! <= data[0] && scale.max! >= data[1]);
  }

  private draw(plot: uPlot): void {
    const { ctx } = plot;
    const lane = plot.bbox.height / LANES.length;
    const colours = new Map(LANES.map((kind) => [kind, colour(`part-${tint(kind)}`)]));
    const ink = colour("on-part");
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    ctx.clip();
    for (const [kind, start, took, name] of this.bars) {
      const left = plot.valToPos(start, "x", true);
      const width = Math.max(1, plot.valToPos(start + took, "x", true) - left);
      if (left > plot.bbox.left + plot.bbox.width || left + width < plot.bbox.left) continue;
      const row = LANE.get(kind);
      if (row === undefined) continue;
      const top = plot.bbox.top + LANES.indexOf(row) * lane + lane * 0.14;
      ctx.fillStyle = colours.get(row) ?? ink;
      ctx.fillRect(left, top, width, lane * 0.72);
      if (width > 60 && name) label(ctx, name, ink, Math.max(left, plot.bbox.left), top + lane * 0.36, width);
    }
    ctx.restore();
  }

  private under(plot: uPlot): Event | undefined {
    const { left, top } = plot.cursor;
    if (left === undefined || top === undefined || left < 0) return undefined;
    const at = plot.posToVal(left, "x");
    const near = plot.posToVal(left + 3, "x") - at;
    const kind = LANES[Math.floor((top / plot.over.clientHeight) * LANES.length)];
    return this.bars.find((bar) => LANE.get(bar[0]) === kind && bar[1] - near <= at && at <= bar[1] + bar[2] + near);
  }

  private point(plot: uPlot): void {
    const bar = this.under(plot);
    fill(this.about, bar ? sentence(bar) : "Drag to zoom, double-click for all of it; click a run to open its graph.");
  }

  private click(plot: uPlot): void {
    const name = this.under(plot)?.[3];
    const row = this.app.known().find((graph) => graph.name === name);
    if (row) this.app.openGraph(row.number);
  }

  private zoom(factor: number): void {
    const { min, max } = this.plot?.scales.x ?? {};
    if (min === undefined || max === undefined || min === null || max === null) return;
    const middle = (min + max) / 2, half = ((max - min) / 2) * factor;
    this.plot?.setScale("x", { min: Math.max(0, middle - half), max: middle + half });
  }

  private move(share: number): void {
    const { min, max } = this.plot?.scales.x ?? {};
    if (min === undefined || max === undefined || min === null || max === null) return;
    const by = Math.max(-min, (max - min) * share);
    this.plot?.setScale("x", { min: min + by, max: max + by });
  }

  private reset(): void {
    const data = this.plot?.data[0];
    if (data) this.plot?.setScale("x", { min: data[0], max: data[1] });
  }

  private key(event: KeyboardEvent): void {
    const acts = new Map<string, () => void>([
      ["ArrowLeft", () => this.move(-0.25)],
      ["ArrowRight", () => this.move(0.25)],
      ["+", () => this.zoom(0.5)],
      ["-", () => this.zoom(2)],
      ["Escape", () => this.reset()],
    ]);
    const act = acts.get(event.key);
    if (act) {
      act();
      event.preventDefault();
    }
  }

  private resize(): void {
    if (this.element.hidden || !this.frame.clientWidth) return;
    if (!this.plot) return this.redraw();
    if (this.plot.width !== this.frame.clientWidth) {
      this.plot.setSize({ width: this.frame.clientWidth, height: height() });
    }
  }
}

function addLane(kind: string): void {
  LANE.set(kind, kind);
  LANES.push(kind);
}

function tint(kind: string): string {
  return OF_A_RANK.test(kind) ? "collective" : kind;
}

function height(): number {
  return HEIGHT + 30 * LANES.filter((lane) => OF_A_RANK.test(lane)).length;
}

function label(
  ctx: CanvasRenderingContext2D, name: string, ink: string, left: number, middle: number, width: number,
): void {
  const size = 11 * devicePixelRatio;
  ctx.font = `${size}px system-ui, sans-serif`;
  ctx.fillStyle = ink;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  const room = Math.floor((width - 10) / (size * 0.6));
  if (room > 2) ctx.fillText(shortened(name, room), left + 5, middle);
}

function legend(): HTMLElement {
  const entries = LANES.map((kind) =>
    el("li", {}, el("span", { class: `swatch part-${kind}` }), WORDS[kind] ?? kind),
  );
  return el("ul", { class: "legend", "aria-label": "Colours" }, ...entries);
}

function share(step: Step): HTMLElement {
  const total = PARTS.reduce((sum, part) => sum + step[part], 0) || 1;
  const parts = PARTS.map((part) => {
    const made = el("span", { class: `part-${part}`, title: `${part} ${seconds(step[part])}` });
    made.style.width = `${(100 * step[part]) / total}%`;
    return made;
  });
  const words = PARTS.map((part) => `${part} ${Math.round((100 * step[part]) / total)} %`).join(", ");
  return el("div", { class: "share", role: "img", "aria-label": words }, ...parts);
}

/** Times between the first event and the last in which nobody recorded, compiled or ran. */
function idleTimes(events: Event[]): Event[] {
  const busy = events
    .filter(([kind]) => ["record", "compile", "run"].includes(LANE.get(kind) ?? ""))
    .sort((a, b) => a[1] - b[1]);
  const found: Event[] = [];
  let end = busy.length ? busy[0][1] : 0;
  for (const [, start, took] of busy) {
    if (start > end) found.push(["idle", end, start - end, "", "", 0]);
    end = Math.max(end, start + took);
  }
  return found;
}

/** Recording stops while its thread waits or compiles: what is left of the event. */
function withoutWaits(event: Event, events: Event[]): Event[] {
  const [kind, start, took, name, site, thread] = event;
  if (kind !== "record") return [event];
  const found: Event[] = [];
  let from = start;
  const end = start + took;
  for (const [other, begin, length, , , by] of events) {
    if (begin >= end) break;
    const lane = LANE.get(other);
    if ((lane !== "sync" && lane !== "compile") || by !== thread || begin + length <= from) continue;
    if (begin > from) found.push([kind, from, begin - from, name, site, thread]);
    from = Math.max(from, begin + length);
  }
  if (from < end) found.push([kind, from, end - from, name, site, thread]);
  return found;
}

function sentence([kind, start, took, name, site]: Event): string {
  const what = `${WORDS[kind] ?? kind} ${name}`.trim();
  return `${what}: ${seconds(took)} at ${seconds(start)}${site ? `, ${site}` : ""}`;
}

function describe(events: Event[], steps: Step[]): string {
  const sums = LANES.filter((kind) => kind !== "idle").map((kind) => {
    const all = events.filter((event) => LANE.get(event[0]) === kind);
    const total = all.reduce((sum, event) => sum + event[2], 0);
    return `${all.length} × ${WORDS[kind] ?? kind}, ${seconds(total)}`;
  });
  return `Timeline of ${steps.length} steps: ${sums.join("; ")}. The table below has the numbers.`;
}
