// The list of graphs: how often each was met again, and why it was made.
import type { App, Panel } from "./app";
import { button, el, fill } from "./dom";
import { count, seconds } from "./format";
import { Table } from "./table";
import type { GraphRow } from "./types";

export class Graphs implements Panel {
  readonly title = "Graphs";
  readonly element: HTMLElement;
  private about = el("p");
  private table: Table<GraphRow>;

  constructor(private app: App) {
    this.table = new Table<GraphRow>("Graphs, as they were met", [
      { title: "Graph", cell: (g) => this.link(g), key: (g) => g.number },
      { title: "Nodes", cell: (g) => count(g.nodes), key: (g) => g.nodes, number: true },
      { title: "Hits", cell: (g) => count(g.hits), key: (g) => g.hits, number: true },
      { title: "Runs", cell: runs, key: (g) => g.runs, number: true },
      { title: "Compile", cell: (g) => seconds(g.compile_seconds), key: (g) => g.compile_seconds, number: true },
      { title: "Run", cell: (g) => seconds(g.run_seconds), key: (g) => g.run_seconds, number: true },
      { title: "A run", cell: (g) => seconds(each(g)), key: each, number: true },
      { title: "Backend", cell: backend, key: (g) => g.backend },
      { title: "Cut at", cell: (g) => el("code", {}, g.site), key: (g) => g.site },
      { title: "Why it is new", cell: why },
    ]);
    this.element = el("div", { class: "stack" }, el("h2", {}, "Graphs"), this.about, this.table.element);
  }

  show(): void {
    const { graphs } = this.app.summary;
    const hits = graphs.reduce((sum, graph) => sum + graph.hits, 0);
    const compiled = graphs.reduce((sum, graph) => sum + graph.compile_seconds, 0);
    fill(this.about, `${count(graphs.length)} graphs, ${count(hits)} hits, ${seconds(compiled)} compiling.`);
    this.table.set(graphs);
  }

  private link(graph: GraphRow): HTMLElement {
    if (!graph.known) return el("span", { title: "its nodes are no longer known" }, graph.name);
    return button(graph.name, () => this.app.openGraph(graph.number), `Explore ${graph.name}`);
  }
}

function each(graph: GraphRow): number {
  return graph.runs ? graph.run_seconds / graph.runs : 0;
}

function runs(graph: GraphRow): string {
  return graph.interpreted_runs ? `${count(graph.runs)} (${graph.interpreted_runs} interpreted)` : count(graph.runs);
}

function backend(graph: GraphRow): string {
  if (graph.failure) return `${graph.backend}: ${graph.failure}`;
  return graph.compiled ? graph.backend : `${graph.backend} (not compiled yet)`;
}

function why(graph: GraphRow): string | HTMLElement {
  return graph.why ? el("span", { class: "why" }, graph.why) : "the first one at its line";
}
