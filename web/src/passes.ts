// The text of a graph as it was recorded, and after each pass that compiling it runs.
import type { App, Panel } from "./app";
import { choice, el, fill, setOptions } from "./dom";
import type { PassText } from "./types";

export class Passes implements Panel {
  readonly title = "Passes";
  readonly element: HTMLElement;
  private graphs: HTMLSelectElement;
  private after: HTMLSelectElement;
  private about = el("p", { role: "status" });
  private text = el("pre", { class: "text", tabindex: 0, "aria-label": "The graph as text" });
  private stages: PassText[] = [];
  private seen = -1;

  constructor(private app: App) {
    const [graph, graphs] = choice("Graph", (value) => {
      app.current = Number(value);
      void this.show();
    });
    const [after, select] = choice("Pass", () => this.draw());
    this.graphs = graphs;
    this.after = select;
    this.element = el("div", { class: "stack" },
      el("h2", {}, "A graph after each pass"), el("div", { class: "tools" }, graph, after), this.about, this.text,
    );
  }

  async show(): Promise<void> {
    setOptions(this.graphs, this.app.graphOptions());
    const number = this.app.chosen();
    if (number < 0) return fill(this.about, "No graph is known yet.");
    this.graphs.value = String(number);
    if (number === this.seen) return;
    this.seen = number;
    fill(this.about, "Running the passes …");
    fill(this.text);
    const stages = await this.app.source.passes(number);
    if (number !== this.seen) return;
    this.stages = stages ?? [];
    setOptions(this.after, this.stages.map(([name, , text], i) => [String(i), `${name}${text === null ? " (nothing to do)" : ""}`]));
    if (!stages) return fill(this.about, "This graph is no longer known.");
    this.draw();
  }

  private draw(): void {
    const at = Number(this.after.value);
    const changed = this.stages.slice(0, at + 1).filter(([, , text]) => text !== null);
    fill(this.about, this.stages[at][1]);
    fill(this.text, changed[changed.length - 1][2]);
  }
}
