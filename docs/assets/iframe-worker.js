/* Browsers start no worker from file://, and the theme's search is a worker. There, a hidden frame takes its place: it
 * loads the worker's script, whose messages go to the page and back. (The theme asks for `extra.polyfills`.) */
if (location.protocol === "file:") {
  const Started = Worker;
  window.Worker = class extends EventTarget {
    constructor(url, options) {
      if (String(url).startsWith("data:")) return new Started(url, options); // of these workers browsers start some
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => { // what the worker calls to answer
        const message = new MessageEvent("message", {data: structuredClone(data)});
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      const load = (source) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, {src: source, onload: done, onerror: failed});
        inside.document.body.append(script);
      });
      // One after another; the theme waits for the promise.
      inside.importScripts = (...sources) => sources.reduce((before, next) => before.then(() => load(next)), Promise.resolve());
      this.ready = load(url);
    }
    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", {data: structuredClone(data)})));
    }
    terminate() { this.frame.remove(); }
  };
}
