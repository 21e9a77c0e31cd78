/** Requests to the server that this page came from; no other address is ever asked. */

const PATIENCE_MS = 60_000;

/** A refusal or failure, in words that are shown as they are. */
export class ApiError extends Error {}

/** The server could not be reached. When it is back, nothing else changes by which the page would ask again. */
export class NoAnswer extends ApiError {}

export const AGAIN_MS = 5000;

export function query(path: string, params: Record<string, string | number | boolean | undefined | string[]>): string {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (Array.isArray(value)) value.forEach((each) => search.append(key, each));
    else if (value !== undefined && value !== "") search.set(key, String(value));
  }
  const text = search.toString();
  return text ? `${path}?${text}` : path;
}

export function runPath(run: string, rest: string): string {
  return `api/runs/${encodeURIComponent(run)}/${rest}`;
}

/** A notebook's frame keeps no cookie: there the token stays in the address of the page. */
function headers(): HeadersInit {
  const token = new URLSearchParams(location.search).get("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
}

export async function get<T>(url: string, signal?: AbortSignal): Promise<T> {
  const patience = AbortSignal.timeout(PATIENCE_MS);
  let response: Response;
  try {
    response = await fetch(url, {
      headers: headers(),
      signal: signal ? AbortSignal.any([signal, patience]) : patience,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    if (patience.aborted) throw new NoAnswer(`The server has not answered for ${PATIENCE_MS / 1000} seconds.`);
    throw new NoAnswer(
      "The server does not answer. Is `trew view` still running? If it was started again, open the address that it printed.",
    );
  }
  return (await decode(response)) as T;
}

async function decode(response: Response): Promise<unknown> {
  let body: unknown;
  try {
    body = await response.json();
  } catch {
    body = null;
  }
  if (response.ok && body !== null) return body;
  const message = (body as { error?: { message?: string } } | null)?.error?.message;
  if (response.status === 401 || (response.status === 403 && !message)) {
    throw new ApiError("This page is not known to the server any more. Open the address that `trew view` printed.");
  }
  throw new ApiError(message ?? `The server answered with status ${response.status} and no explanation.`);
}
