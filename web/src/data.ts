// Where the page gets its data from: the server that sent it, or the file that it is.
import type { GraphDocument, PassText, Summary } from "./types";

export interface Source {
  /** null: nothing has changed since `have`. */
  summary(have: string): Promise<Summary | null>;
  graph(number: number): Promise<GraphDocument | null>;
  difference(before: number, after: number): Promise<string | null>;
  passes(number: number): Promise<PassText[] | null>;
}

interface Everything {
  summary: Summary;
  graphs: GraphDocument[];
  differences: [number, number, string | null][];
  passes: [number, PassText[] | null][];
}

class FromFile implements Source {
  private graphs: Map<number, GraphDocument>;
  private differences = new Map<string, string | null>();

  constructor(private all: Everything) {
    this.graphs = new Map(all.graphs.map((graph) => [graph.number, graph]));
    for (const [a, b, text] of all.differences) this.differences.set(`${a} ${b}`, text);
  }

  async summary(have: string): Promise<Summary | null> {
    return have === "" ? { ...this.all.summary, state: "file" } : null;
  }

  async graph(number: number): Promise<GraphDocument | null> {
    return this.graphs.get(number) ?? null;
  }

  async difference(before: number, after: number): Promise<string | null> {
    return this.differences.get(`${before} ${after}`) ?? null;
  }

  async passes(number: number): Promise<PassText[] | null> {
    return this.all.passes.find(([graph]) => graph === number)?.[1] ?? null;
  }
}

class FromServer implements Source {
  private graphs = new Map<string, Promise<GraphDocument | null>>();
  private compiled = new Map<number, boolean>();

  async summary(have: string): Promise<Summary | null> {
    const answer = await fetch(`summary.json?have=${encodeURIComponent(have)}`);
    if (answer.status === 204) return null;
    if (!answer.ok) throw new Error(`the server says ${answer.status}`);
    const summary: Summary = await answer.json();
    for (const row of summary.graphs) this.compiled.set(row.number, row.compiled);
    return summary;
  }

  graph(number: number): Promise<GraphDocument | null> {
    const key = `${number} ${this.compiled.get(number)}`; // compiled later: it has code then
    let found = this.graphs.get(key);
    if (!found) {
      found = ask<GraphDocument>(`graph/${number}`);
      this.graphs.set(key, found);
      found.catch(() => this.graphs.delete(key));
    }
    return found;
  }

  async difference(before: number, after: number): Promise<string | null> {
    return (await ask<{ text: string }>(`difference/${before}/${after}`))?.text ?? null;
  }

  passes(number: number): Promise<PassText[] | null> {
    return ask<PassText[]>(`passes/${number}`);
  }
}

async function ask<T>(path: string): Promise<T | null> {
  const answer = await fetch(path);
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`the server says ${answer.status}`);
  return answer.json();
}

export function source(): Source {
  const inside = document.getElementById("data");
  return inside ? new FromFile(JSON.parse(inside.textContent ?? "")) : new FromServer();
}
