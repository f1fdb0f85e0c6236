// One conversation that uses a tool, and one object, with Vercel's AI SDK. Prints, as JSON, its version and answer.
// Modules are looked up from the folder in the first argument, which has a node_modules.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, url] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/x.js`));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, generateObject, stepCountIs, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const model = createOpenAICompatible({ name: "local", baseURL: `${url}/v1`, apiKey: "none" })("tiny");
const common = { model, temperature: 0, maxOutputTokens: 400, maxRetries: 0 };
const add = tool({
  description: "Adds.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});
const { object } = await generateObject({ ...common, schema: z.object({ total: z.number() }), prompt: "A total." });
const { text } = await generateText({ ...common, tools: { add }, stopWhen: stepCountIs(3), prompt: "2 and 2?" });
const { version } = JSON.parse(readFileSync(`${folder}/node_modules/ai/package.json`));
console.log(JSON.stringify({ ai: [version, object.total === 4 ? text : JSON.stringify(object)] }));
