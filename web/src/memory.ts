// Memory while a graph runs: what is alive at each node, by the line that made it.
import uPlot from "uplot";
import type { App, Panel } from "./app";
import { button, choice, el, fill, setOptions } from "./dom";
import { bytes, count, shortened } from "./format";
import { Table } from "./table";
import { colour, onTheme } from "./theme";
import type { GraphDocument, LineMemory } from "./types";

const HEIGHT = 300;
const POWERS = Array.from({ length: 50 }, (_, i) => 2 ** i);

export class MemoryPanel implements Panel {
  readonly title = "Memory";
  readonly element: HTMLElement;
  private select: HTMLSelectElement;
  private about = el("p", { role: "status" });
  private under = el("p", { class: "about" });
  private frame = el("div", { class: "chart", role: "img", tabindex: 0 });
  private table: Table<LineMemory>;
  private plot: uPlot | null = null;
  private doc: GraphDocument | null = null;

  constructor(private app: App) {
    const [chooser, select] = choice("Graph", (value) => {
      app.current = Number(value);
      void this.show();
    });
    this.select = select;
    const rank = (row: LineMemory) => this.doc?.memory.lines.indexOf(row) ?? 0;
    this.table = new Table<LineMemory>("Memory by line", [
      { title: "Line", cell: (row) => lineCell(row, rank(row)), key: (row) => row.line },
      { title: "At the peak", cell: (row) => bytes(row.at_peak), key: (row) => row.at_peak, number: true },
      { title: "At most", cell: (row) => bytes(row.most), key: (row) => row.most, number: true },
      { title: "Buffers", cell: (row) => count(row.buffers), key: (row) => row.buffers, number: true },
    ]);
    this.element = el("div", { class: "stack" },
      el("h2", {}, "Memory over the step"),
      el("div", { class: "tools" }, chooser, button("Show the node at the peak", () => this.openPeak())),
      this.about, this.frame, this.under, this.table.element,
    );
    onTheme(() => this.draw());
    new ResizeObserver(() => this.resize()).observe(this.frame);
  }

  async show(): Promise<void> {
    setOptions(this.select, this.app.graphOptions());
    const number = this.app.chosen();
    if (number < 0) return fill(this.about, "No graph is known yet.");
    this.select.value = String(number);
    if (this.doc?.number === number && this.plot) return this.resize();
    const doc = await this.app.graph(number);
    if (!doc) return fill(this.about, "This graph is no longer known.");
    this.doc = doc;
    const { memory } = doc;
    fill(this.about, `Inputs ${bytes(memory.inputs)}, at most ${bytes(memory.peak)} more, at node ${count(memory.peak_node)} of ${count(doc.nodes.length)}. What kernels need for themselves is not counted.`);
    this.table.set(memory.lines);
    this.frame.setAttribute("aria-label", `Memory over the ${doc.nodes.length} nodes of ${doc.name}: at most ${bytes(memory.peak)}, besides ${bytes(memory.inputs)} of inputs. The table below has the numbers by line.`);
    this.draw();
  }

  private openPeak(): void {
    if (this.doc) this.app.openNode(this.doc.number, this.doc.memory.peak_node);
  }

  private draw(): void {
    this.plot?.destroy();
    this.plot = null;
    if (!this.doc || !this.frame.clientWidth) return;
    const { memory } = this.doc;
    const shown = memory.lines.filter((line) => line.points);
    const layers = [...shown.map((line) => line.points!), memory.others];
    const sums: number[][] = [];
    for (const points of layers) {
      const below = sums[sums.length - 1];
      sums.push(points.map((value, i) => value + (below ? below[i] : 0)));
    }
    const text = colour("text-soft"), grid = colour("line");
    const fills = layers.map((_, i) => colour(i < shown.length ? `series-${i}` : "series-others"));
    this.plot = new uPlot(
      {
        width: this.frame.clientWidth, height: HEIGHT, legend: { show: false },
        cursor: { drag: { x: true, y: false }, points: { show: false } },
        scales: { x: { time: false }, y: { range: (_, __, max) => [0, Math.max(1, max * 1.05)] } },
        axes: [
          { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid }, label: "node", labelSize: 18, labelFont: "12px system-ui, sans-serif", labelGap: 0, values: (_, ticks) => ticks.map((t) => count(t)) },
          { stroke: text, size: 84, incrs: POWERS, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid }, values: (_, ticks) => ticks.map((t) => bytes(t)) },
        ],
        series: [
          {},
          ...sums.map((_, i) => layers.length - 1 - i).map((layer) => ({
            stroke: fills[layer], fill: fills[layer], width: 0.5, points: { show: false },
            paths: uPlot.paths.stepped!({ align: 1 }),
          })),
        ],
        hooks: {
          setCursor: [(plot) => this.point(plot)],
          ready: [(plot) => plot.over.addEventListener("click", () => this.click(plot))],
        },
      },
      [memory.positions, ...[...sums].reverse()] as uPlot.AlignedData,
      this.frame,
    );
  }

  private point(plot: uPlot): void {
    const at = plot.cursor.idx, { doc } = this;
    if (at === null || at === undefined || !doc) return fill(this.under, "Point at a node to read its memory; click to open it.");
    const node = doc.memory.positions[at];
    const op = node < doc.nodes.length ? doc.texts[doc.nodes[node][0]] : "";
    fill(this.under, `node ${count(node)} ${op}: ${bytes(doc.memory.totals[at])} alive`);
  }

  private click(plot: uPlot): void {
    const at = plot.cursor.idx;
    if (at !== null && at !== undefined && this.doc) this.app.openNode(this.doc.number, this.doc.memory.positions[at]);
  }

  private resize(): void {
    if (this.element.hidden || !this.frame.clientWidth) return;
    if (!this.plot) return this.draw();
    if (this.plot.width !== this.frame.clientWidth) this.plot.setSize({ width: this.frame.clientWidth, height: HEIGHT });
  }
}

function lineCell(row: LineMemory, rank: number): HTMLElement {
  const swatch = el("span", { class: `swatch series-${row.points ? rank : "others"}` });
  return el("span", {}, swatch, el("code", { title: row.line }, shortened(row.line || "no line", 120)));
}
