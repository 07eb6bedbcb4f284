"use strict";
// Ask for the state of the store; when it has changed, take the new page in without losing place or open parts.
(() => {
  let version = document.currentScript.dataset.version;
  const status = () => document.getElementById("live");
  const look = async () => {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      const now = await answer.text();
      if (answer.ok && now !== version) {
        const text = await (await fetch("./", { cache: "no-store" })).text();
        const fresh = new DOMParser().parseFromString(text, "text/html");
        for (const part of document.querySelectorAll("details[open][id], input[id]:checked")) {
          const twin = fresh.getElementById(part.id);
          if (twin) twin.setAttribute(part.tagName === "DETAILS" ? "open" : "checked", "");
        }
        document.querySelector("main").replaceWith(fresh.querySelector("main"));
        status().replaceWith(fresh.getElementById("live"));
        document.title = fresh.title;
        version = now;
      }
      status().classList.remove("lost");
    } catch {
      status().classList.add("lost");
    }
    setTimeout(look, 2000);
  };
  setTimeout(look, 2000);
})();
