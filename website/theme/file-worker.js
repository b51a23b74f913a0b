// Search runs in a worker, which browsers refuse for pages opened from disk. There, run its script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      this.frame.srcdoc = "<!doctype html><html lang=en><title>search</title>";
      this.frame.onload = () => {
        const inside = this.frame.contentWindow;
        inside.postMessage = (data) => this.later(this, data);
        inside.importScripts = (...urls) => {
          for (const each of urls) this.script(inside, each);
        };
        this.script(inside, url).onload = () => {
          for (const data of this.waiting) this.later(inside, data);
          this.waiting = null;
        };
      };
      document.documentElement.append(this.frame);
    }
    script(inside, url) {
      const script = inside.document.createElement("script");
      script.src = String(url);
      inside.document.body.append(script);
      return script;
    }
    later(target, data) { // a worker never answers before the sender has finished
      setTimeout(() => target.dispatchEvent(new MessageEvent("message", { data })));
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.later(this.frame.contentWindow, data);
    }
    terminate() {
      this.frame.remove();
    }
    set onmessage(listener) {
      this.addEventListener("message", listener);
    }
    set onerror(listener) {
      this.addEventListener("error", listener);
    }
  };
}
