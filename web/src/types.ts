// What the page is given; written by torpor/debug/view/model.py.

/** kind, start and seconds, name, the user's line, number of the thread */
export type Event = [string, number, number, string, string, number];

export interface Step {
  number: number;
  start: number;
  seconds: number;
  record: number;
  compile: number;
  run: number;
  wait: number;
  idle: number;
}

export interface GraphRow {
  number: number;
  name: string;
  site: string;
  nodes: number;
  hits: number;
  runs: number;
  interpreted_runs: number;
  compiled: boolean;
  compile_seconds: number;
  run_seconds: number;
  record_seconds: number;
  failure: string;
  why: string;
  backend: string;
  known: boolean;
}

export interface Summary {
  title: string;
  live: boolean;
  state: string;
  versions: Record<string, string>;
  graphs: GraphRow[];
  events: Event[];
  steps: Step[];
}

export interface LineMemory {
  line: string;
  at_peak: number;
  most: number;
  buffers: number;
  points: number[] | null;
}

export interface Memory {
  inputs: number;
  peak: number;
  peak_node: number;
  positions: number[];
  totals: number[];
  others: number[];
  lines: LineMemory[];
}

export interface GraphDocument {
  number: number;
  name: string;
  texts: string[];
  nodes: number[][];
  operands: number[][];
  inputs: number[][];
  outputs: number[];
  groups: number[][];
  parents: number[];
  memory: Memory;
  code: string;
}

/** name and description of a pass, and the graph after it as text; null: as before it */
export type PassText = [string, string, string | null];

/** Places in a row of `nodes`; the first six hold numbers of texts. */
export const OP = 0,
  NAME = 1,
  CALL = 2,
  TYPE = 3,
  LINE = 4,
  SCOPE = 5,
  FLOPS = 6,
  TRAFFIC = 7,
  BYTES = 8,
  LAST_USE = 9,
  ALIVE = 10;
