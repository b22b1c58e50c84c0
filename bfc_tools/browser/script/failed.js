// Called where the page could not be drawn: by a browser that is too old, or from a file that was cut off.

function failed(error) {
  const box = document.getElementById("problem");
  box.textContent = `This report cannot be drawn here: ${error.message}. It needs a browser of 2023 or later, and the whole file.`;
  box.hidden = false;
  throw error;
}
