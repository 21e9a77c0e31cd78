/** The JSON that the server sends: see src/trew/view/. A number that is not finite is null. */

export type Num = number | null;

export interface Run {
  id: string;
  name: string;
  path: string;
  kind: "policy" | "reward" | "rounds";
  /** What the data gave in place of completions, which no reward judged; empty where they were sampled. */
  given: "demonstrations" | "pairs" | "";
  state: "running" | "finished" | "stopped";
  step: number;
  steps: Num;
  updated: number;
  model: string;
  preset: string;
  seed: number;
  setting: string;
  revision: string;
  /** Of its metrics: see there. */
  read: number;
  warnings: number;
  has_rollouts: boolean;
  /** Of held-out prompts at least. */
  has_tokens: boolean;
}

export interface Runs {
  version: string;
  runs: Run[];
  /** What is not listed, in words. */
  left_out?: string[];
}

export interface Eval {
  step: number;
  accuracy: Num;
  low: Num;
  high: Num;
  n: Num;
}

export interface Loss {
  step: number;
  loss: Num;
  low: Num;
  high: Num;
  n: Num;
}

export interface Mark {
  step: number;
  kind: "warning" | "checkpoint" | "resumed" | "bad_step" | "event";
  text: string;
  rule?: string;
}

export interface Metrics {
  revision: string;
  /** Another number where rows were taken back, or are of another run. */
  read: number;
  /** What could not be read of them; empty if everything could. */
  problem?: string;
  steps: number[];
  columns: Record<string, Num[]>;
  evals: Eval[];
  /** Of each data set of several. */
  eval_sets?: Record<string, Eval[]>;
  /** Of held-out demonstrations. */
  losses?: Loss[];
  /** What evaluations measured besides, by name, without intervals. */
  eval_others?: Record<string, Eval[]>;
  marks: Mark[];
  groups: { title: string; columns: string[] }[];
  help: Record<string, string>;
}

export interface Accuracy {
  accuracy: Num;
  low: Num;
  high: Num;
  n: Num;
}

export interface Finding {
  rule: string;
  step_from: number;
  step_to: Num;
  text: string;
  advice: string;
}

export interface Cluster {
  ranks: unknown;
  servers: unknown[];
  versions: unknown;
  ages: Record<string, number>;
  staleness: unknown;
  age_mean: Num;
  age_max: Num;
  waited_s: Num;
  idle_s: Num;
}

/** A process of a run: bytes by phase and part that were planned, and by phase that were measured. */
export interface Process {
  who: string;
  device: string | null;
  planned: Record<string, Record<string, number>>;
  measured: Record<string, number>;
  measured_peak_bytes: Num;
}

export interface Memory {
  processes: Process[];
  /** Why there is no plan. */
  why: string | null;
  prompt_tokens: Num;
  measured_peak_bytes: Num;
}

export interface Summary {
  before: Accuracy | null;
  after: Accuracy | null;
  /** Of held-out demonstrations. */
  loss_before?: Omit<Loss, "step"> | null;
  loss_after?: Omit<Loss, "step"> | null;
  summary: Record<string, unknown> | null;
  health: Finding[];
  memory: Memory | null;
  cluster: Cluster | null;
  /** What the run's end says about before and after. */
  outcome?: string[];
  /** What could not be read of the folder. */
  problems?: string[];
}

export interface Config {
  text: string;
  values: Record<string, unknown>;
}

export interface ConfigKeys {
  keys: { key: string; values: Record<string, unknown>; differs: boolean; default?: unknown }[];
}

export interface StepInfo {
  step: number;
  rows: number;
  groups: number;
  mean: Num;
  low_quantile: Num;
  high_quantile: Num;
  histogram: { edges: number[]; counts: number[] } | null;
}

export interface Steps {
  steps: StepInfo[];
  evals: { step: number; rows: number; mean: Num; groups?: number }[];
  /** The names of the rewards. */
  parts?: string[];
  /** Files that could not be read, with the reason. */
  unreadable?: string[];
}

export interface Row {
  step: number;
  eval: boolean;
  group: number;
  trained_group: Num;
  uid: string;
  sample: number;
  prompt: string;
  /** Of the text of the prompt: several prompts may have one uid. Empty where the text cannot be read. */
  prompt_hash: string;
  completion: string;
  /** What it is where the data gave it, and not the policy. */
  given?: "demonstration" | "chosen" | "rejected" | "";
  cut?: boolean;
  prompt_cut?: boolean;
  score: Num;
  status: string;
  parts: Record<string, Num>;
  statuses: Record<string, string>;
  extracted: string | null;
  gold: unknown;
  finish_reason: string | null;
  rollout_status: string | null;
  /** It reached the limit of tokens; an episode that is only out of turns did not. */
  truncated: boolean;
  rollout_error: string | null;
  length: number;
  advantage: Num;
  policy_version: Num;
  turns: number;
  /** Why an episode ended. */
  ending: string | null;
  /** What was said in an episode. */
  said?: Said[];
}

/** A message of an episode; `who` is a role, or "policy" for what the model wrote. */
export interface Said {
  who: string;
  text: string;
  facts: [name: string, value: string][];
}

export interface Rollouts {
  total: number;
  /** null: its table is damaged. */
  rows: (Row | null)[];
}

export interface Group {
  group: number;
  uid: string;
  prompt: string;
  prompt_hash: string;
  gold: unknown;
  mean: Num;
  std: Num;
  rows: Row[];
}

export interface Groups {
  total: number;
  groups: Group[];
}

export interface PromptInfo {
  uid: string;
  prompt_hash: string;
  prompt: string;
  gold: unknown;
  times: number;
  first: { step: number; mean: Num };
  last: { step: number; mean: Num };
  gain: Num;
  disagreement: Num;
}

export interface Prompts {
  total: number;
  prompts: PromptInfo[];
}

export interface PromptHistory {
  uid: string;
  prompt: string;
  gold: unknown;
  /** All visits; of very many only the first and the last are here. */
  total: number;
  visits: { step: number; eval: boolean; mean: Num; rows: Row[] }[];
}

export interface Token {
  /** null where no tokenizer is known. */
  text: string | null;
  id: number;
  sampled: boolean;
  /** End of text and the like. */
  special?: boolean;
}

export interface Turn {
  role: "policy" | "environment";
  start: number;
  end: number;
  text: string;
  reward: Num;
  finish_reason?: string | null;
  tool_calls?: unknown[] | null;
  cut?: boolean;
  /** Of the model's turns: the environment's name for where it began, and what it measured. */
  state?: string | null;
  metrics?: Record<string, Num>;
  /** Of the environment's turns. */
  messages?: Message[];
}

export interface About {
  title: string;
  help: string;
  diverging: boolean;
  /** The value that means neither up nor down. */
  middle?: number;
}

export interface Message {
  role: string;
  content: unknown;
}

export interface Completion {
  row: Row;
  messages: Message[] | null;
  tokens: Token[];
  values: Record<string, Num[]>;
  about: Record<string, About>;
  turns: Turn[] | null;
  versions: { version: number; start: number; end: number }[] | null;
  /** Why tokens have no text, if they have none. */
  pieces?: { why?: string };
}

export type Interval = { mean: Num; low: Num; high: Num } & Record<string, Num>;

export interface Comparison {
  metric?: { title: string; better: string };
  level?: number;
  power?: number;
  baseline?: string;
  settings_that_differ?: Record<string, Record<string, unknown>>;
  groups?: {
    name: string;
    mean: Interval;
    sd: Num;
    iqm: Interval;
    runs: { folder: string; seed: number; task: string; finished: boolean; score: number }[];
  }[];
  pairs?: { task: string; seed: number }[];
  comparisons?: {
    name: string;
    pairs: number;
    difference: Interval;
    sd: Num;
    p_value: Num;
    probability_of_improvement: Interval;
    detectable_difference: Num;
    seeds_needed: Record<string, number>;
    verdict: string;
  }[];
  not_compared?: string[];
  left_out?: string[];
  fewest_seeds?: number;
  notes?: string[];
}
