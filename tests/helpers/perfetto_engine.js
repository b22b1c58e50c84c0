// Perfetto's trace processor, as its page runs it in a worker. Requests come on stdin and replies go to stdout, each as
// its length in four bytes and a message.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];

class XMLHttpRequest {
  open(method, name) {
    this.name = name;
  }
  send() {
    const bytes = fs.readFileSync(path.join(folder, path.basename(this.name)));
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
  }
}

const { exit, stderr } = process;
const complain = (text) => stderr.write(`${text}\n`);
console.log = () => {};
console.warn = console.error = complain;
delete globalThis.process; // it would not be a browser's
Object.assign(globalThis, { XMLHttpRequest, WorkerGlobalScope: Object, self: globalThis });
globalThis.location = { href: "https://localhost/engine_bundle.js" };
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));

const port = {
  postMessage(bytes) {
    const head = Buffer.alloc(4);
    head.writeUInt32LE(bytes.length);
    for (const part of [head, bytes]) {
      for (let at = 0; at < part.length; ) at += fs.writeSync(1, part, at);
    }
  },
};
globalThis.onmessage({ data: port });

function read(count) {
  const found = new Uint8Array(count);
  for (let at = 0; at < count; ) {
    const got = fs.readSync(0, found, at, count - at);
    if (got === 0) exit(0);
    at += got;
  }
  return found;
}

setTimeout(() => {
  for (;;) {
    const size = new DataView(read(4).buffer).getUint32(0, true);
    port.onmessage({ data: read(size) });
  }
}, 0);
