// What the panels share: the data, the graph that is looked at, and ways from one panel to another.
import type { Source } from "./data";
import type { GraphDocument, GraphRow, Summary } from "./types";

export interface Panel {
  readonly title: string;
  readonly element: HTMLElement;
  /** It is on the screen now, or there is news while it is. */
  show(): void | Promise<void>;
}

export class App {
  summary: Summary = {
    title: "", live: false, state: "", versions: {}, graphs: [], events: [], steps: [],
  };
  current = -1; // the number of the graph that is looked at
  openPanel: (title: string) => void = () => {};
  openNode: (graph: number, node: number) => void = () => {};

  constructor(readonly source: Source) {}

  /** Graphs that can be shown. */
  known() {
    return this.summary.graphs.filter((row) => row.known);
  }

  /** The graph to look at: the one chosen, else the one whose nodes ran most often. */
  chosen(): number {
    const known = this.known();
    if (known.some((row) => row.number === this.current)) return this.current;
    const weight = (row: GraphRow) => row.nodes * (row.runs + 1);
    const heaviest = known.reduce((a, b) => (weight(b) > weight(a) ? b : a), known[0]);
    return heaviest ? heaviest.number : -1;
  }

  graph(number: number): Promise<GraphDocument | null> {
    return this.source.graph(number);
  }

  graphOptions(): [string, string][] {
    return this.known().map((row) => [
      String(row.number),
      `${row.name}: ${row.nodes} nodes, ${row.hits} hits`,
    ]);
  }

  openGraph(number: number, panel = "Explorer"): void {
    this.current = number;
    this.openPanel(panel);
  }
}
