"""Call a replica from Python through a Serve handle, without HTTP.

Starts Ray and the application in this script. Where they run already (in the same Ray cluster),
`serve.get_app_handle("remora")` gives the same handle.
"""

from ray import serve

from remora.deployments.app import build

handle = serve.run(build({"model": {"path": "smollm2-135m-instruct"}}), name="remora")

# Fields of the HTTP API, as keywords or as one dict.
question = {"role": "user", "content": "What is the capital of France?"}
answer = handle.chat.remote(messages=[question], max_tokens=64, temperature=0).result()
print(answer["choices"][0]["message"]["content"])

# With `stream`, the result is iterated over; in async code: `async for` over what is awaited.
body = {"messages": [question], "max_tokens": 64, "temperature": 0, "stream": True}
for chunk in handle.chat.remote(body).result():
    for choice in chunk["choices"]:
        print(choice["delta"].get("content") or "", end="", flush=True)
print()

# A chunk of `generate` holds the whole text so far; one that was not fetched in time is overtaken.
chunks = handle.options(stream=True).generate.remote(
    text="The capital of France is", sampling_params={"max_new_tokens": 16}
)
for chunk in chunks:
    print(chunk["text"])

serve.shutdown()
