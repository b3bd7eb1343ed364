// The drawing of what is unfolded: laid out by dagre, drawn by cytoscape.
import * as dagre from "@dagrejs/dagre";
import cytoscape from "cytoscape";
import { el } from "./dom";
import type { Folds, Item } from "./folds";
import { count, shortened } from "./format";
import { colour, onTheme } from "./theme";

const MOST_BOXED = 260; // above this, boxes make the layout slow
const LONGEST_LABEL = 30;
const READABLE = 0.62; // a zoom at which labels can be read

type Place = { x: number; y: number };

export class Drawing {
  readonly element = el("div", { class: "drawing", role: "img", tabindex: 0 });
  private cy: cytoscape.Core | null = null;
  private folds: Folds | null = null;
  private selected: Item = -1;

  constructor(
    private onSelect: (item: Item) => void,
    private onToggle: (item: Item) => void,
  ) {
    onTheme(() => this.restyle());
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  draw(folds: Folds, selected: Item, keepView: boolean): void {
    this.folds = folds;
    this.selected = selected;
    const cy = (this.cy ??= this.make());
    const view = { zoom: cy.zoom(), pan: { ...cy.pan() } };
    const anchor = keepView ? this.place(selected) : null;
    const visible = folds.visible(), edges = folds.edges();
    const boxes = visible.length <= MOST_BOXED ? folds.boxes() : [];
    cy.batch(() => {
      cy.elements().remove();
      cy.add(elements(folds, visible, boxes, edges));
    });
    arrange(cy, layOut(cy, edges.length));
    this.mark();
    if (keepView && anchor) this.holdStill(view, anchor, selected);
    else cy.fit(undefined, 24);
    if (cy.zoom() > 1.2) cy.zoom({ level: 1.2, renderedPosition: this.middle() });
    if (!keepView) this.atLeastReadable();
    const names = `${count(visible.length)} items and ${count(edges.length)} arrows`;
    this.element.setAttribute("aria-label", `Drawing of the graph: ${names}. The outline says the same in words.`);
    this.element.dataset.items = String(visible.length);
  }

  select(item: Item, centre: boolean): void {
    this.selected = item;
    this.mark();
    const found = this.cy?.getElementById(String(item));
    if (centre && found?.nonempty() && this.cy) {
      if (this.cy.zoom() < 0.5) this.cy.zoom(0.8);
      this.cy.center(found);
    }
  }

  fit(): void {
    this.cy?.fit(undefined, 24);
  }

  zoom(factor: number): void {
    const cy = this.cy;
    if (cy) cy.zoom({ level: cy.zoom() * factor, renderedPosition: this.middle() });
  }

  resize(): void {
    this.cy?.resize();
  }

  private middle(): Place {
    return { x: this.element.clientWidth / 2, y: this.element.clientHeight / 2 };
  }

  /** A graph too long for the screen is shown from its start, large enough to be read. */
  private atLeastReadable(): void {
    const cy = this.cy;
    if (!cy || cy.zoom() >= READABLE) return;
    const top = cy.nodes().min((node) => node.position("y")).ele;
    cy.zoom(READABLE);
    cy.pan({
      x: this.element.clientWidth / 2 - READABLE * top.position("x"),
      y: 60 - READABLE * top.position("y"),
    });
  }

  private place(item: Item): Place | null {
    const found = this.cy?.getElementById(String(item));
    return found?.nonempty() ? { ...found.renderedPosition() } : null;
  }

  private holdStill(view: { zoom: number; pan: Place }, anchor: Place, item: Item): void {
    const cy = this.cy!;
    cy.viewport(view);
    const now = this.place(item);
    if (now) cy.panBy({ x: anchor.x - now.x, y: anchor.y - now.y });
  }

  private mark(): void {
    this.cy?.elements(".selected, .near").removeClass("selected near");
    const found = this.cy?.getElementById(String(this.selected));
    if (found?.nonempty()) {
      found.addClass("selected");
      (found as cytoscape.NodeSingular).connectedEdges().addClass("near");
    }
  }

  private make(): cytoscape.Core {
    const cy = cytoscape({
      container: this.element,
      style: style(),
      minZoom: 0.03,
      maxZoom: 3,
      autoungrabify: true,
      boxSelectionEnabled: false,
      hideEdgesOnViewport: false,
      textureOnViewport: false,
    });
    cy.on("tap", "node", (event) => this.onSelect(Number(event.target.id())));
    cy.on("dbltap", "node", (event) => {
      const item = Number(event.target.id());
      if (this.folds?.isGroup(item)) this.onToggle(item);
    });
    return cy;
  }

  private restyle(): void {
    this.cy?.style(style());
  }

  private key(event: KeyboardEvent): void {
    const step = 80;
    const moves = new Map<string, [number, number]>([
      ["ArrowLeft", [step, 0]], ["ArrowRight", [-step, 0]], ["ArrowUp", [0, step]], ["ArrowDown", [0, -step]],
    ]);
    const move = moves.get(event.key);
    if (move) this.cy?.panBy({ x: move[0], y: move[1] });
    else if (event.key === "+") this.zoom(1.25);
    else if (event.key === "-") this.zoom(0.8);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.folds?.isGroup(this.selected)) this.onToggle(this.selected);
    else return;
    event.preventDefault();
  }
}

function elements(
  folds: Folds, visible: Item[], boxes: Item[], edges: [Item, Item, number][],
): cytoscape.ElementDefinition[] {
  const boxed = new Set(boxes);
  const around = (item: Item) => {
    const parent = folds.parent[item];
    return boxed.has(parent) ? { parent: String(parent) } : {};
  };
  const node = (item: Item, box: boolean): cytoscape.ElementDefinition => {
    const label = shortened(folds.label(item), LONGEST_LABEL);
    const text = box ? label : `${label}\n${folds.note(item)}`;
    const widest = Math.max(...text.split("\n").map((line) => line.length));
    const kind = folds.isGroup(item) ? (box ? "box" : `group ${folds.kind(item)}`) : "op";
    return {
      data: { id: String(item), label: text, width: Math.max(60, widest * 7 + 20), ...around(item) },
      classes: `${kind} phase-${folds.phase(item) || "none"}`,
    };
  };
  return [
    ...boxes.map((item) => node(item, true)),
    ...visible.map((item) => node(item, false)),
    ...edges.map(([from, to, values]) => ({
      data: { id: `${from}-${to}`, source: String(from), target: String(to), width: Math.min(5, 1 + Math.log2(values)) },
    })),
  ];
}

const HEIGHT = 42;

type Layout = InstanceType<typeof dagre.graphlib.Graph>;

function layOut(cy: cytoscape.Core, edges: number): Layout {
  const graph = new dagre.graphlib.Graph({ compound: true });
  const ranker = edges > 900 ? "longest-path" : "network-simplex";
  graph.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 36, edgesep: 12, marginx: 10, marginy: 10, ranker });
  graph.setDefaultEdgeLabel(() => ({}));
  cy.nodes().forEach((node) => {
    graph.setNode(node.id(), node.isParent() ? {} : { width: node.data("width"), height: HEIGHT });
  });
  cy.nodes().forEach((node) => {
    const parent = node.parent();
    if (parent.nonempty()) graph.setParent(node.id(), parent.first().id());
  });
  cy.edges().forEach((edge) => {
    graph.setEdge(edge.data("source"), edge.data("target"));
  });
  dagre.layout(graph);
  return graph;
}

/** Put nodes where the layout has them, and lead arrows around what is in their way. */
function arrange(cy: cytoscape.Core, layout: Layout): void {
  const place = (id: string) => layout.node(id) as Place;
  cy.batch(() => {
    cy.nodes().filter((node) => !node.isParent()).positions((node) => {
      const { x, y } = place(node.id());
      return { x, y };
    });
    cy.edges().forEach((edge) => {
      const from = edge.data("source") as string, to = edge.data("target") as string;
      const { points } = layout.edge(from, to) as { points?: Place[] };
      const bends = turns(place(from), place(to), (points ?? []).slice(1, -1));
      if (bends.length) {
        edge.addClass("bent");
        edge.data({ weights: bends.map((bend) => bend[0]), distances: bends.map((bend) => bend[1]) });
      }
    });
  });
}

/** Points beside the line between two places: how far along it, and how far away from it. */
function turns(from: Place, to: Place, points: Place[]): [number, number][] {
  const dx = to.x - from.x, dy = to.y - from.y, long = Math.hypot(dx, dy);
  if (long < 1) return [];
  const found = points.map(({ x, y }): [number, number] => [
    ((x - from.x) * dx + (y - from.y) * dy) / (long * long),
    ((y - from.y) * dx - (x - from.x) * dy) / long,
  ]);
  return found.some(([, away]) => Math.abs(away) > 3) ? found : [];
}

function style(): cytoscape.StylesheetJson {
  const phases = ["forward", "backward", "optimizer", "none"];
  return [
    {
      selector: "node",
      style: {
        label: "data(label)", shape: "round-rectangle", width: "data(width)", height: HEIGHT,
        "text-wrap": "wrap", "text-valign": "center", "text-halign": "center",
        "font-family": "system-ui, sans-serif", "font-size": 12, color: colour("text"),
        "border-width": 1, "line-height": 1.2, "background-color": colour("surface"),
        "border-color": colour("line-strong"),
      },
    },
    ...phases.map((phase) => ({
      selector: `node.phase-${phase}`,
      style: { "background-color": colour(`${phase}-fill`), "border-color": colour(`${phase}-line`) },
    })),
    { selector: "node.group", style: { "border-width": 2.5, "font-weight": 600 } },
    { selector: "node.repeat", style: { "border-style": "double", "border-width": 5 } },
    {
      selector: "node.box",
      style: {
        "background-opacity": 0.28, "border-width": 1, "border-style": "dashed", "text-valign": "top",
        "text-halign": "center", "font-size": 12, "text-margin-y": -3, padding: "14px", color: colour("text-soft"),
      },
    },
    {
      selector: "edge",
      style: {
        width: "data(width)", "line-color": colour("edge"), "target-arrow-color": colour("edge"),
        "target-arrow-shape": "triangle", "curve-style": "bezier", "arrow-scale": 0.9,
      },
    },
    {
      selector: "edge.bent",
      style: {
        "curve-style": "round-segments", "segment-weights": "data(weights)", "segment-distances": "data(distances)",
        "segment-radii": 18, "edge-distances": "node-position",
      },
    },
    { selector: "edge.near", style: { "line-color": colour("accent"), "target-arrow-color": colour("accent"), "z-index": 9 } },
    { selector: "node.selected", style: { "border-color": colour("accent"), "border-width": 4, "border-style": "solid" } },
  ] as cytoscape.StylesheetJson;
}
