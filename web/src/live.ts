// Answers of the server that this page came from, again and again.

export type Answer<T> = { data: T } | { refused: string; status: number } | { gone: true };

/** Requests with the token that was given, if there is one. */
export class Server {
  private token = sessionStorage.getItem("heapbpf-token") ?? "";

  setToken(token: string) {
    this.token = token;
    sessionStorage.setItem("heapbpf-token", token);
  }

  async ask(path: string): Promise<Response | null> {
    const headers: Record<string, string> = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    try {
      return await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(60_000) });
    } catch {
      return null;
    }
  }

  async json<T>(path: string): Promise<Answer<T>> {
    const response = await this.ask(path);
    if (!response) return { gone: true };
    try {
      if (response.ok) return { data: (await response.json()) as T };
      return { refused: (await response.text()).trim().slice(0, 500), status: response.status };
    } catch {
      return { gone: true };
    }
  }
}

/** Seconds between two refreshes, more if answers take long. */
export function refreshPause(answerSeconds: number): number {
  return Math.min(15, Math.max(2, answerSeconds * 4));
}

/** Seconds before the next try after so many failures in a row. */
export function retryPause(failures: number): number {
  return Math.min(10, 2 ** Math.min(failures - 1, 10));
}
