// The browser's storage. A browser may refuse it, as when cookies are blocked: then things last as long as the page.

class Memory {
  #values = new Map();

  get length() {
    return this.#values.size;
  }

  key(index) {
    return [...this.#values.keys()][index] ?? null;
  }

  getItem(key) {
    return this.#values.get(key) ?? null;
  }

  setItem(key, value) {
    this.#values.set(key, value);
  }

  removeItem(key) {
    this.#values.delete(key);
  }
}

export const local = storageOf("localStorage");
export const session = storageOf("sessionStorage");

function storageOf(name) {
  try {
    return window[name] ?? new Memory();
  } catch {
    return new Memory(); // to look at it is a SecurityError
  }
}
