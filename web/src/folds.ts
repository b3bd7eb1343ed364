// A graph as a tree of groups, some of them unfolded, and what is visible of it.
import { shortened, shortOp, shortType } from "./format";
import { BYTES, FLOPS, type GraphDocument, LINE, NAME, OP, SCOPE, TRAFFIC, TYPE } from "./types";

/** Groups are numbered from 0; node n is item `groups + n`. */
export type Item = number;

export const MOST_VISIBLE = 700;

export class Folds {
  readonly groups: number;
  readonly children: Item[][];
  readonly parent: Item[];
  readonly users: number[][];
  readonly first: number[]; // the first node inside each group
  readonly totals: { nodes: number; places: number; flops: number; traffic: number; bytes: number }[];
  readonly open = new Set<Item>([0]);
  private lower: string[];

  constructor(readonly doc: GraphDocument) {
    const count = doc.nodes.length;
    this.groups = doc.groups.length;
    this.children = doc.groups.map(() => []);
    this.parent = [...doc.groups.map((row) => row[0]), ...doc.parents];
    this.first = doc.groups.map(() => count);
    this.totals = doc.groups.map(() => ({ nodes: 0, places: 0, flops: 0, traffic: 0, bytes: 0 }));
    for (let node = 0; node < count; node++) this.count(node);
    for (let item = 1; item < this.groups + count; item++) this.children[this.parent[item]].push(item);
    for (const list of this.children) list.sort((a, b) => this.middle(a) - this.middle(b) || a - b);
    this.users = doc.nodes.map(() => []);
    doc.operands.forEach((operands, node) => {
      for (const operand of new Set(operands)) if (operand >= 0) this.users[operand].push(node);
    });
    this.lower = doc.texts.map((text) => text.toLowerCase());
    this.openOnlyChildren(0);
  }

  private count(node: number): void {
    const row = this.doc.nodes[node];
    for (let group = this.doc.parents[node]; group >= 0; group = this.parent[group]) {
      const total = this.totals[group];
      total.nodes++;
      total.places += node;
      total.flops += row[FLOPS];
      total.traffic += row[TRAFFIC];
      total.bytes += row[BYTES];
      this.first[group] = Math.min(this.first[group], node);
    }
  }

  item(node: number): Item {
    return this.groups + node;
  }

  node(item: Item): number {
    return item - this.groups;
  }

  isGroup(item: Item): boolean {
    return item < this.groups;
  }

  start(item: Item): number {
    return this.isGroup(item) ? this.first[item] : this.node(item);
  }

  /** Where an item stands in the graph: a group in the middle of its nodes. */
  private middle(item: Item): number {
    return this.isGroup(item) ? this.totals[item].places / this.totals[item].nodes : this.node(item);
  }

  kind(group: Item): string {
    return this.doc.texts[this.doc.groups[group][1]];
  }

  text(node: number, field: number): string {
    return this.doc.texts[this.doc.nodes[node][field]];
  }

  label(item: Item): string {
    if (this.isGroup(item)) return this.doc.texts[this.doc.groups[item][2]];
    const node = this.node(item);
    return shortOp(this.text(node, OP));
  }

  /** What stands under the label. */
  note(item: Item): string {
    if (this.isGroup(item)) return `${this.totals[item].nodes} ${this.totals[item].nodes === 1 ? "node" : "nodes"}`;
    return shortened(shortType(this.text(this.node(item), TYPE)), 34);
  }

  /** forward, backward or optimizer */
  phase(item: Item): string {
    const node = this.start(item);
    return node < this.doc.nodes.length ? this.text(node, SCOPE).split(":")[0] : "";
  }

  ancestors(item: Item): Item[] {
    const found: Item[] = [];
    for (let up = this.parent[item]; up >= 0; up = this.parent[up]) found.push(up);
    return found;
  }

  // -- folding ---------------------------------------------------------------------------------

  isOpen(item: Item): boolean {
    return this.open.has(item);
  }

  /** Unfold a group, and what is alone in it; false if too much would be visible. */
  unfold(group: Item): boolean {
    if (this.visible().length + this.children[group].length > MOST_VISIBLE) return false;
    this.open.add(group);
    this.openOnlyChildren(group);
    return true;
  }

  private openOnlyChildren(group: Item): void {
    while (this.children[group].length === 1 && this.isGroup(this.children[group][0])) {
      group = this.children[group][0];
      this.open.add(group);
    }
  }

  fold(group: Item): void {
    for (const item of [...this.open]) {
      if (item === group || this.ancestors(item).includes(group)) this.open.delete(item);
    }
  }

  foldAll(): void {
    this.open.clear();
    this.open.add(0);
    this.openOnlyChildren(0);
  }

  /** Unfold every visible group, if that leaves few enough; how many were. */
  unfoldMore(): number {
    const closed = this.visible().filter((item) => this.isGroup(item));
    return closed.filter((group) => this.unfold(group)).length;
  }

  /** Make an item visible. */
  reveal(item: Item): void {
    const path = this.ancestors(item);
    const missing = path.filter((group) => !this.open.has(group));
    const more = missing.reduce((sum, group) => sum + this.children[group].length, 0);
    if (this.visible().length + more > MOST_VISIBLE) this.foldAll();
    for (const group of path) this.open.add(group);
  }

  /** Nodes and folded groups that are seen, in the order of the graph. */
  visible(): Item[] {
    const found: Item[] = [];
    const stack = [0];
    while (stack.length) {
      const item = stack.pop()!;
      if (this.isGroup(item) && this.open.has(item)) {
        for (let i = this.children[item].length - 1; i >= 0; i--) stack.push(this.children[item][i]);
      } else found.push(item);
    }
    return found;
  }

  /** Unfolded groups but the whole graph: boxes around what is in them. */
  boxes(): Item[] {
    return [...this.open].filter((item) => item !== 0 && this.ancestors(item).every((up) => this.open.has(up)));
  }

  /** Which visible item stands for each node. */
  standIns(): Int32Array {
    const found = new Int32Array(this.doc.nodes.length).fill(-1);
    for (const item of this.visible()) this.stand(item, item, found);
    return found;
  }

  private stand(item: Item, as: Item, found: Int32Array): void {
    const stack = [item];
    while (stack.length) {
      const next = stack.pop()!;
      if (this.isGroup(next)) stack.push(...this.children[next]);
      else found[this.node(next)] = as;
    }
  }

  /** Pairs of visible items with the number of values that go from one to the other. */
  edges(): [Item, Item, number][] {
    const stand = this.standIns();
    const found = new Map<number, number>();
    const wide = this.groups + this.doc.nodes.length;
    this.doc.operands.forEach((operands, node) => {
      for (const operand of operands) {
        if (operand < 0 || stand[operand] === stand[node]) continue;
        const key = stand[operand] * wide + stand[node];
        found.set(key, (found.get(key) ?? 0) + 1);
      }
    });
    return [...found].map(([key, count]) => [Math.floor(key / wide), key % wide, count]);
  }

  // -- search ----------------------------------------------------------------------------------

  /** Groups and nodes that hold all words of a query, in the order of the graph. */
  search(query: string, most: number): { items: Item[]; total: number } {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return { items: [], total: 0 };
    const hits = words.map((word) => this.lower.map((text) => text.includes(word)));
    const items: Item[] = [];
    let total = 0;
    const add = (item: Item) => {
      if (total++ < most) items.push(item);
    };
    for (let group = 1; group < this.groups; group++) {
      if (hits.every((hit) => hit[this.doc.groups[group][2]])) add(group);
    }
    this.doc.nodes.forEach((row, node) => {
      if (hits.every((hit) => [OP, NAME, TYPE, LINE, SCOPE].some((field) => hit[row[field]]))) {
        add(this.item(node));
      }
    });
    return { items, total };
  }
}
