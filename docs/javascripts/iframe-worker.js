// A page that is opened from a folder may not start a worker, and the search is one. So there a
// worker's script runs in a hidden frame of the page, with the same two functions for messages.
if (location.protocol === "file:") {
  const message = (data) => new MessageEvent("message", { data: structuredClone(data) });
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<body></body>";
      this.started = new Promise((resolve, reject) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(message(data));
          const script = inside.document.createElement("script");
          script.onload = () => resolve(inside);
          script.onerror = reject;
          script.src = url;
          inside.document.body.append(script);
        };
      });
      document.documentElement.append(this.frame);
    }

    async postMessage(data) {
      const inside = await this.started;
      inside.dispatchEvent(message(data));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
